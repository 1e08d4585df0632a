"""Stop strings and stop regexes, looked for while text grows.

Strings: one automaton each (Knuth-Morris-Pratt, its failure table made only as far as it was needed),
so the work is linear in the text however long the strings are. Regexes: RE2, linear in the text that it
looks at, which is the last few thousand bytes; a request whose regexes are slow at that is ended, because
everybody waits while they run. Either counts as found with the token that completes
it; if one token completes several, strings go before regexes and the first in a list wins. The text is
cut at the first place where the winner stands.

A part of a stop string is never shown before it is clear what it becomes. Nobody can say that of a
regex: what a stream has shown of its match before the match was complete is taken back by the answer
at the end.
"""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass
from typing import Any

import re2

from ouro_sgl.errors import RequestError

MAX_REGEX_BYTES = 256
# Instructions of all regexes of a request; a look at the text may take so many steps for each byte.
MAX_REGEX_PROGRAM = 1000
SECONDS_PER_LOOK = 0.001  # CPU time that a look at the text may take
MAX_DEBT = 0.25  # seconds beyond that, less what later looks take less: more end the request
REGEX_WINDOW = 4096  # bytes: longer matches may not be found


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


class StopRegexes:
    """Compiled patterns in RE2's syntax, most important first. ``^`` and ``$`` are the ends of the output so
    far. One object serves all sequences of a request, which share its time.

    Raises:
        RequestError: a pattern is wrong, too large, or matches the empty text.
    """

    def __init__(self, patterns: list[str]) -> None:
        self._regexes = [(pattern, _compile(pattern)) for pattern in patterns]
        if sum(regex.programsize for _, regex in self._regexes) > MAX_REGEX_PROGRAM:
            raise RequestError("stop_regex is too complex: shorten its repetitions and classes")
        self._debt = 0.0

    def search(self, text: bytes, start: int) -> tuple[str, int, int] | None:
        """Of the first pattern that has one, the first match that begins at ``start`` or later: the pattern
        and two byte offsets.

        Raises:
            RequestError: the looks so far took too long.
        """
        if self._debt > MAX_DEBT:
            raise RequestError("stop_regex takes too long to look for: use simpler patterns")
        before = time.thread_time()
        try:
            for pattern, regex in self._regexes:
                match = regex.search(text, start)
                if match is not None:
                    return (pattern, *match.span())
            return None
        finally:
            # Quick looks pay debts off, but save nothing up for a burst of slow ones.
            self._debt = max(0.0, self._debt + time.thread_time() - before - SECONDS_PER_LOOK)


def _compile(pattern: str) -> Any:
    try:
        size = len(pattern.encode())
    except UnicodeEncodeError:
        raise RequestError("stop_regex holds half a character (a lone surrogate)") from None
    if size > MAX_REGEX_BYTES:
        raise RequestError(f"stop_regex must have at most {MAX_REGEX_BYTES} bytes, got {size}")
    options = re2.Options()
    options.log_errors = False
    try:
        regex = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise RequestError(f"stop_regex: {text}") from None
    if regex.search(b"") is not None:
        raise RequestError("stop_regex must not match the empty text")
    return regex


class _RegexSearch:
    """The end of a growing text, in UTF-8, and where in it the search for regexes begins."""

    def __init__(self, regexes: StopRegexes) -> None:
        self._regexes = regexes
        self._tail = b""
        self._begin = 0  # offset in the tail: nothing that was found before counts again
        self._dropped = 0  # characters in front of the tail

    def feed(self, piece: str) -> StopMatch | None:
        """Add ``piece``; the match of the first regex in the list that has one now."""
        if not piece:
            return None
        self._tail += piece.encode("utf-8", "replace")
        found = self._regexes.search(self._tail, self._begin)
        if found is None:
            self._trim()
            return None
        pattern, *offsets = found
        start, end = (self._dropped + self._characters(offset) for offset in offsets)
        return StopMatch(pattern, start, end)

    def skip(self) -> None:
        """What the text holds so far shall not match."""
        self._begin = len(self._tail)

    def _trim(self) -> None:
        """Keep the window, and before it enough for the regexes to see what precedes it."""
        surplus = len(self._tail) - 2 * REGEX_WINDOW
        if surplus > 0:
            cut = surplus + REGEX_WINDOW - 4
            while self._tail[cut] & 0xC0 == 0x80:  # not inside a character
                cut -= 1
            self._dropped += self._characters(cut)
            self._tail = self._tail[cut:]
            self._begin = max(self._begin - cut, 1)

    def _characters(self, offset: int) -> int:
        """Characters in front of a byte offset of the tail."""
        return len(codecs.utf_8_decode(self._tail[:offset], "replace")[0])


class StopMatcher:
    """Looks for several stops in the text of one sequence.

    Args:
        stops: non-empty strings, most important first.
        min_tokens: a match completed by an earlier token than this one (counted from 1) is ignored.
        regexes: likewise, less important than any string.
    """

    def __init__(self, stops: list[str], min_tokens: int, regexes: StopRegexes | None = None) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._regexes = None if regexes is None else _RegexSearch(regexes)
        self._min_tokens = min_tokens
        self._length = 0

    def feed(self, piece: str, num_tokens: int) -> StopMatch | None:
        """Add the text that token number ``num_tokens`` completed; the match that it brought.

        Raises:
            RequestError: as :meth:`StopRegexes.search`.
        """
        winner: StopMatch | None = None
        for automaton in self._automata:
            found = automaton.feed(piece)
            if found is not None and winner is None and num_tokens >= self._min_tokens:
                end = self._length + found
                winner = StopMatch(automaton.stop, end - len(automaton.stop), end)
        self._length += len(piece)
        if self._regexes is not None:
            match = self._regexes.feed(piece)
            if match is not None and num_tokens < self._min_tokens:
                self._regexes.skip()
            elif winner is None:
                winner = match
        return winner

    def held_back(self) -> int:
        """Characters at the end of the text that may become a stop string."""
        return max((automaton.matched for automaton in self._automata), default=0)
