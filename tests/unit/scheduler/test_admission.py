"""The order of admission and the bound on passing."""

from ouro_sgl.messages import GenerateReq, RowParams
from ouro_sgl.scheduler.admission import Admission, Verdict, WaitingQueue
from ouro_sgl.scheduler.request import Request, RequestState


def request(uid: int, priority: int = 0, leader: int | None = None) -> Request:
    message = GenerateReq(uid, [1], RowParams(1), priority=priority, leader=leader)
    return Request(message, arrival=uid, generated_need=0, total_loops=4)


class Gate:
    """Admits the requests that fit and remembers their order."""

    def __init__(self, fits: set[int], rows: int = 100) -> None:
        self.fits = fits
        self.rows = rows
        self.admitted: list[int] = []

    def __call__(self, request: Request) -> Verdict:
        if len(self.admitted) == self.rows:
            return Verdict.STOP
        if request.uid not in self.fits:
            return Verdict.NO_ROOM
        request.state = RequestState.PREFILL
        self.admitted.append(request.uid)
        return Verdict.ADMITTED


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for item in requests:
        queue.push(item)
    return queue


def test_priority_first_then_arrival() -> None:
    queue = queue_of(request(0), request(1, priority=5), request(2), request(3, priority=5))
    gate = Gate({0, 1, 2, 3})
    Admission(queue, 64, 8, False).run(lambda r: 0, gate)
    assert gate.admitted == [1, 3, 0, 2]
    assert len(queue) == 0


def test_a_request_is_passed_a_bounded_number_of_times() -> None:
    big = request(0)
    queue = queue_of(big, *(request(uid) for uid in range(1, 10)))
    gate = Gate(set(range(1, 10)))
    admission = Admission(queue, 64, 3, False)
    admission.run(lambda r: 0, gate)
    assert gate.admitted == [1, 2, 3]
    assert big.bypasses == 3
    admission.run(lambda r: 0, gate)
    assert gate.admitted == [1, 2, 3]
    gate.fits.add(0)
    admission.run(lambda r: 0, gate)
    assert gate.admitted == [1, 2, 3, 0, *range(4, 10)]


def test_no_bypass_at_all() -> None:
    queue = queue_of(request(0), request(1))
    gate = Gate({1})
    Admission(queue, 64, 0, False).run(lambda r: 0, gate)
    assert gate.admitted == []


def test_a_full_prefill_budget_or_full_rows_pass_nobody() -> None:
    queue = queue_of(request(0), request(1), request(2))
    gate = Gate({1, 2}, rows=1)
    Admission(queue, 64, 8, False).run(lambda r: 0, gate)
    assert gate.admitted == [1]
    assert [r.bypasses for r in queue] == [1, 0]


def test_only_the_head_of_the_queue_is_scanned() -> None:
    queue = queue_of(*(request(uid) for uid in range(10)))
    gate = Gate({5})
    Admission(queue, 5, 8, False).run(lambda r: 0, gate)
    assert gate.admitted == []
    Admission(queue, 6, 8, False).run(lambda r: 0, gate)
    assert gate.admitted == [5]


def test_longest_prefix_first_within_a_priority_and_the_bound() -> None:
    prefix = {0: 0, 1: 3, 2: 9, 3: 9, 4: 99}
    requests = [request(uid, priority=int(uid == 0)) for uid in range(5)]
    queue = queue_of(*requests)
    gate = Gate(set(range(5)), rows=3)
    admission = Admission(queue, 64, 2, True)
    admission.run(lambda r: prefix[r.uid], gate)
    assert gate.admitted == [0, 4, 2]
    assert requests[1].bypasses == 2  # nothing passes it any more, however long its prefix
    gate.rows = 4
    admission.run(lambda r: prefix[r.uid], gate)
    assert gate.admitted == [0, 4, 2, 1]


def test_followers_wait_outside_and_return_to_their_place() -> None:
    leader, follower, late = request(0), request(1, leader=0), request(2)
    queue = queue_of(leader, late)
    queue.hold(follower, 0)
    assert len(queue) == 3
    assert [r.uid for r in queue] == [0, 2, 1]
    assert [r.uid for r in queue.window(9)] == [0, 2]
    queue.release(0)
    queue.release(0)
    assert [r.uid for r in queue.window(9)] == [0, 1, 2]
    queue.remove(follower)
    queue.hold(follower, 0)
    queue.remove(follower)
    assert [r.uid for r in queue] == [0, 2]
