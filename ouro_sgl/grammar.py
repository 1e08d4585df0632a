"""Grammars as the processes of the server share them: one compiler, one set of limits.

The frontend translates what a client sent (a regex, a JSON schema, an EBNF grammar) into llguidance's
notation and tries it out in a process that it can throw away; the scheduler compiles the same text
again with the same vocabulary and limits. So what passed the trial compiles here too.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ouro_sgl.errors import OuroError
from ouro_sgl.vocabulary import grammar_table, load_tokenizer

# Per matcher. A lexer state takes 1 to 2 kB, so one matcher stays below about 50 MB; a step's fuel is
# about 5 ms of work. Large lexemes are computed ahead because without it some regexes never return.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    max_lexer_states=25_000,
    precompute_large_lexemes=True,
    verbose_errors=False,
)


class GrammarError(OuroError):
    """A grammar that cannot be used; says why in one line."""


class _Tokens:
    """A vocabulary in the shape that llguidance reads."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: tokenizers.Tokenizer, table: list[bytes]) -> None:
        # One id behind the vocabulary means "the end may follow here". No id of the model does: which
        # ids end a request is the request's own affair.
        self.eos_token_id = len(table)
        self.tokens = [*table, b"<end>"]
        self._tokenizer = tokenizer
        self._ids = {data: token_id for token_id, data in enumerate(table) if data}
        self._longest = max(map(len, table), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of bytes that the grammar leaves no choice about: as a prompt would be cut, if its
        tokens stand for exactly these bytes."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = self._tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids if b"".join([self.tokens[i] for i in ids]) == data else self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token_id = self._ids.get(data[at : at + size])
                if token_id is not None:
                    break
            else:
                return ids  # no token begins here
            ids.append(token_id)
            at += size
        return ids


class GrammarCompiler:
    """Compiles for one vocabulary.

    Args:
        folder: holds ``tokenizer.json``.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        tokenizer = load_tokenizer(folder)
        table = grammar_table(tokenizer, vocab_size)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, table)))

    def compile(self, source: str) -> LLMatcher:
        """A matcher at its start. ``deep_copy`` makes more of it at little cost.

        Releases the interpreter lock while it works. Time and memory are bounded for sources that
        passed the frontend's trial, and for no others.

        Args:
            source: a grammar in llguidance's notation.

        Raises:
            GrammarError: it is none, or exceeds :data:`LIMITS`.
        """
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        check(matcher)
        return matcher


def check(matcher: LLMatcher) -> None:
    """Raise :class:`GrammarError` if ``matcher`` has failed; a failed one stays so."""
    if matcher.is_error():
        message = one_line(matcher.get_error())
        if message.startswith("NoExtension"):
            message = "no token of the vocabulary continues what the grammar asks for"
        raise GrammarError(message)


def one_line(message: str) -> str:
    """The part of an error message that a client can use: its first lines joined, shortened."""
    lines = [line.strip() for line in message.splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(("<", "^")))
    return text if len(text) <= 300 else text[:297] + "..."
