"""Splits a text that thinks aloud: what stands in ``<think>`` and what follows it.

The text thinks if it starts with ``<think>`` (white space in front of it is dropped), or if the prompt
has opened the block already. A block that is never closed reaches to the end.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def held_back(text: str, marker: str) -> int:
    """Characters at the end of ``text`` that may become ``marker``; fewer than its length."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class ReasoningSplitter:
    """One sequence. Pieces that may still become a marker wait inside.

    Args:
        inside: the prompt has opened the block.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._undecided = True  # nothing but white space and a part of <think> so far
        self._pending = ""

    def feed(self, piece: str) -> tuple[str, str]:
        """What ``piece`` adds: (reasoning, content)."""
        text = self._pending + piece
        self._pending = ""
        if self._undecided:
            start = text.lstrip()
            if start.startswith(OPEN):
                self._inside = True
                text = start[len(OPEN) :]
            elif OPEN.startswith(start):
                self._pending = text
                return "", ""
            self._undecided = False
        if not self._inside:
            return "", text
        reasoning, found, content = text.partition(CLOSE)
        if found:
            self._inside = False
            return reasoning, content
        held = held_back(text, CLOSE)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], ""

    def finish(self) -> tuple[str, str]:
        """What is left at the end: (reasoning, content)."""
        rest, self._pending = self._pending, ""
        return (rest, "") if self._inside else ("", rest)
