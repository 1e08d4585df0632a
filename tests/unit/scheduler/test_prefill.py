from ouro_sgl.messages import GenerateReq, RowParams
from ouro_sgl.scheduler.prefill import PrefillQueue
from ouro_sgl.scheduler.request import Request


def request(uid: int, tokens: int, cached: int = 0) -> Request:
    made = Request(GenerateReq(uid, [1] * tokens, RowParams(1)), uid, 0, 4)
    made.planned = cached
    return made


def cut(queue: PrefillQueue) -> list[list[tuple[int, int, int]]]:
    chunks = []
    while len(queue):
        chunks.append([(r.uid, start, end) for r, start, end in queue.next_chunk()])
    return chunks


def test_packs_several_rows_and_cuts_long_prompts() -> None:
    queue = PrefillQueue(8)
    for item in (request(0, 3), request(1, 12), request(2, 9, cached=8)):
        queue.push(item)
    assert queue.backlog == 16
    assert cut(queue) == [[(0, 0, 3), (1, 0, 5)], [(1, 5, 12), (2, 8, 9)]]
    assert queue.backlog == 0


def test_a_removed_row_is_planned_no_further() -> None:
    queue = PrefillQueue(4)
    first, second = request(0, 10), request(1, 3)
    queue.push(first)
    queue.push(second)
    assert [s[1:] for s in queue.next_chunk()] == [(0, 4)]
    queue.remove(first)
    assert queue.backlog == 3
    assert cut(queue) == [[(1, 0, 3)]]
    queue.remove(second)
    assert queue.backlog == 0
