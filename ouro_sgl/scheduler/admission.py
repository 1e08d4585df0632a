"""Which waiting request goes next.

The queue is ordered by priority (higher first), then retracted requests before others, then arrival.
Only its first ``scan_limit`` requests are looked at. One that does not fit may be passed by later
ones, at most ``max_bypasses`` times; then nothing that comes after it in the queue is admitted before
it. With the policy ``lpm`` requests that are equal but for their arrival are tried by the length of
their cached prefix, under the same bound, so a request without a cached prefix cannot starve.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from ouro_sgl.scheduler.request import Request, RequestState


class Verdict(enum.Enum):
    """What became of one waiting request."""

    ADMITTED = 0
    NO_ROOM = 1  # this one does not fit now; another may
    STOP = 2  # nothing more can be admitted in this step


class WaitingQueue:
    """Requests without a row, in queue order, and followers that wait for their leader's prompt."""

    def __init__(self) -> None:
        self._queue: list[Request] = []
        self._followers: dict[int, list[Request]] = {}  # by the leader's uid

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._followers.values()))

    def __iter__(self) -> Iterator[Request]:
        yield from self._queue
        for followers in self._followers.values():
            yield from followers

    def push(self, request: Request) -> None:
        insort(self._queue, request, key=_order)

    def hold(self, request: Request, leader: int) -> None:
        """Keep ``request`` out of the queue until :meth:`release` is called for its leader."""
        self._followers.setdefault(leader, []).append(request)

    def release(self, leader: int) -> None:
        """Let the followers of ``leader`` into the queue, each at the place of its arrival."""
        for request in self._followers.pop(leader, ()):
            self.push(request)

    def remove(self, request: Request) -> None:
        at = bisect_left(self._queue, request.order, key=_order)
        if at < len(self._queue) and self._queue[at] is request:
            del self._queue[at]
            return
        assert request.leader is not None
        followers = self._followers[request.leader]
        followers.remove(request)
        if not followers:
            del self._followers[request.leader]

    def window(self, limit: int) -> list[Request]:
        """The first ``limit`` requests that may be admitted."""
        return self._queue[:limit]


class Admission:
    """The rule above, for one queue."""

    def __init__(self, queue: WaitingQueue, scan_limit: int, max_bypasses: int, longest_prefix: bool) -> None:
        self.queue = queue
        self.scan_limit = scan_limit
        self.max_bypasses = max_bypasses
        self.longest_prefix = longest_prefix

    def run(self, prefix_length: Callable[[Request], int], admit: Callable[[Request], Verdict]) -> None:
        """Offer waiting requests to ``admit``, which takes them or not; keep the bypass bound.

        Args:
            prefix_length: cached prompt tokens of a request, for the policy ``lpm``.
            admit: tries to put a request on a row; it must change the state of one it admits.
        """
        window = self.queue.window(self.scan_limit)
        order = window
        if self.longest_prefix:
            order = sorted(window, key=lambda r: (*r.order[:2], -prefix_length(r), r.arrival))
        barrier = self._barrier(window)
        for request in order:
            if barrier is not None and request.order > barrier:
                continue
            verdict = admit(request)
            if verdict is Verdict.STOP:
                return
            if verdict is Verdict.ADMITTED:
                self.queue.remove(request)
                for other in window:
                    if other.order < request.order and other.state is RequestState.WAITING:
                        other.bypasses += 1
                barrier = self._barrier(window)

    def _barrier(self, window: list[Request]) -> tuple[int, int, int] | None:
        """The place in the queue behind which nothing may be admitted now."""
        for request in window:
            if request.bypasses >= self.max_bypasses and request.state is RequestState.WAITING:
                return request.order
        return None


def _order(request: Request) -> tuple[int, int, int]:
    return request.order
