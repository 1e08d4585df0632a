"""Cutting prompts into chunks: packed segments of several rows, in the order of admission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ouro_sgl.scheduler.request import Request


class PrefillQueue:
    """Rows whose prompt is not completely planned."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.backlog = 0  # prompt tokens that are admitted and not planned
        self._rows: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def push(self, request: Request) -> None:
        self._rows.append(request)
        self.backlog += len(request.input_ids) - request.planned

    def remove(self, request: Request) -> None:
        """Plan no more of ``request``'s prompt. Does nothing when all of it is planned."""
        if request in self._rows:
            self._rows.remove(request)
            self.backlog -= len(request.input_ids) - request.planned

    def next_chunk(self) -> Iterator[tuple[Request, int, int]]:
        """Segments ``(request, start, end)`` of one chunk: at most ``chunk_size`` tokens."""
        room = self.chunk_size
        while room and self._rows:
            request = self._rows[0]
            start = request.planned
            end = min(start + room, len(request.input_ids))
            request.planned = end
            room -= end - start
            self.backlog -= end - start
            if end == len(request.input_ids):
                self._rows.popleft()
            yield request, start, end
