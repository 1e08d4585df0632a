"""Stop strings, looked for while text grows.

One automaton per string (Knuth-Morris-Pratt, its failure table made only as far as it was needed), so
the work is linear in the text however long the strings are. A string counts as found with the token
that completes it; if one token completes several, the first in the list wins. The text is cut at the
first place where the winner stands.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """``start`` and ``end`` are character offsets in the whole text."""

    stop: str
    start: int
    end: int


class _Automaton:
    """Finds the first occurrence of one string in a text that arrives in pieces."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest suffix of the text that begins the string
        self._failure = [0, 0]  # failure[k]: longest proper border of the first k characters

    def _border(self, length: int) -> int:
        failure, stop = self._failure, self.stop
        while len(failure) <= length:
            border = failure[-1]
            character = stop[len(failure) - 1]
            while border and stop[border] != character:
                border = failure[border]
            failure.append(border + 1 if stop[border] == character else 0)
        return failure[length]

    def feed(self, piece: str) -> int | None:
        """Characters of ``piece`` up to the end of the first match in it, or None.

        After a match the search goes on behind it: ``matched`` is that of the whole piece.
        """
        stop, matched, found = self.stop, self.matched, None
        position = 0
        while position < len(piece):
            if matched == 0:
                position = piece.find(stop[0], position)
                if position < 0:
                    break
            character = piece[position]
            while matched and stop[matched] != character:
                matched = self._border(matched)
            if stop[matched] == character:
                matched += 1
            position += 1
            if matched == len(stop):
                if found is None:
                    found = position
                matched = self._border(matched)
        self.matched = matched
        return found


class StopMatcher:
    """Looks for several stop strings in the text of one sequence.

    Args:
        stops: non-empty strings, most important first.
        min_tokens: a match completed by an earlier token than this one (counted from 1) is ignored.
    """

    def __init__(self, stops: list[str], min_tokens: int) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._min_tokens = min_tokens
        self._length = 0

    def feed(self, piece: str, num_tokens: int) -> StopMatch | None:
        """Add the text that token number ``num_tokens`` completed; the match that it brought."""
        winner: StopMatch | None = None
        for automaton in self._automata:
            found = automaton.feed(piece)
            if found is not None and winner is None and num_tokens >= self._min_tokens:
                end = self._length + found
                winner = StopMatch(automaton.stop, end - len(automaton.stop), end)
        self._length += len(piece)
        return winner

    def held_back(self) -> int:
        """Characters at the end of the text that may become a stop string."""
        return max(automaton.matched for automaton in self._automata)
