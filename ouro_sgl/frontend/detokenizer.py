"""Token ids to text, piece by piece: never half a character, and the pieces join to the final text.

Two implementations of one small interface. With a byte-level tokenizer (the usual case) every token
is a fixed byte string, so decoding is table look-up and an incremental UTF-8 decoder, exact and
linear whatever the model emits. Any other decoder is asked to decode a short window again and again.

Both are defined token by token: how the ids are cut into calls of ``feed`` never changes the text, so
a stream and a plain answer agree. Prompt ids are never given to a detokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

import tokenizers

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8, so the most tokens that one character can span


class Detokenizer(Protocol):
    """The text of one sequence, as far as it is known."""

    def feed(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; an unfinished character waits inside."""

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""


class ByteDetokenizer:
    """For byte-level tokenizers. ``table[i]`` holds the bytes of token i (empty: shows nothing)."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._pending = b""

    def feed(self, ids: Iterable[int]) -> str:
        table = self._table
        data = self._pending + b"".join([table[token_id] for token_id in ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class WindowDetokenizer:
    """For every other tokenizer: decodes the last settled piece together with what follows it.

    Decoders treat the first token of a sequence in their own way (most drop its leading space). The
    output continues a prompt, so an ``anchor`` (an ordinary token, or nothing) stands in front of it.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        skip_special: bool,
        anchor: list[int],
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        """``hidden``: ids that show nothing, whatever ``skip_special`` says."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._skip_special = skip_special
        self._settled = list(anchor)  # tokens whose text has been handed out (or is the anchor's)
        self._settled_text = self._decode(anchor)
        self._pending: list[int] = []
        self._text = self._settled_text  # of settled and pending tokens

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def feed(self, ids: Iterable[int]) -> str:
        return "".join([self._feed_one(token_id) for token_id in ids])

    def _feed_one(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        text = self._decode([*self._settled, *self._pending, token_id])
        if text == self._text:
            return ""  # shows nothing; keeping it would let the window grow without end
        self._pending.append(token_id)
        self._text = text
        if text.endswith(REPLACEMENT) and len(self._pending) < LONGEST_CHARACTER:
            return ""
        piece = text[len(self._settled_text) :]
        self._settled, self._pending = self._pending, []
        self._settled_text = self._text = self._decode(self._settled)
        return piece

    def finish(self) -> str:
        piece = self._text[len(self._settled_text) :]
        self._settled, self._pending = [], []
        self._settled_text = self._text = ""
        return piece
