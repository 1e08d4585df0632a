"""Which tokens may come next in constrained requests, found beside the scheduler's loop.

The scheduler tells a :class:`GrammarEngine` of requests and their tokens and takes what it has found;
neither side ever waits for the other. A mask is made while the rows run the loops of the next token.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ouro_sgl.errors import OuroError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ouro_sgl.grammar import GrammarCompiler

CACHED_GRAMMARS = 32  # compiled; a large one takes some tens of MB

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NextTokens:
    """What may follow the first ``index`` output tokens of request ``uid``.

    ``bits`` as in :class:`Mask`. ``complete``: the grammar is satisfied and nothing but one of the
    request's end ids may follow; ``bits`` allows just these (none if it has none). ``error``: the
    grammar cannot go on, nothing else is said.
    """

    uid: int
    index: int
    bits: bytes = b""
    complete: bool = False
    error: str | None = None

    def allows_beside(self, ids: list[int]) -> bool:
        """Whether ``bits`` allow any other id than these."""
        return bool(int.from_bytes(self.bits, "little") & ~_bits(ids))


class Grammars(Protocol):
    """What the scheduler needs of its grammars. Unknown and forgotten uids are ignored."""

    def start(self, uid: int, source: str, end_ids: list[int]) -> None:
        """A request whose output has to match ``source``, and the ids that may end it."""

    def advance(self, uid: int, token_id: int) -> None:
        """The next output token of ``uid``."""

    def forget(self, uid: int) -> None:
        """``uid`` has ended."""

    def take(self) -> list[NextTokens]:
        """What was found since the last call: one answer to every ``start`` and ``advance``."""


class GrammarEngine:
    """Compiles on one thread and matches on another, so that no mask waits for a compilation.

    Args:
        folder: holds ``tokenizer.json``, read with the first grammar.
        vocab_size: rows of the model's embedding.
        wake: called from the threads whenever :meth:`take` has something new.
    """

    def __init__(self, folder: Path, vocab_size: int, wake: Callable[[], None]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._mask_bytes = -(-vocab_size // 32) * 4
        self._all_ids = (1 << vocab_size) - 1
        self._wake = wake
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        self._matching = ThreadPoolExecutor(1, thread_name_prefix="grammar-match")
        self._active: set[int] = set()  # of the caller's thread, read by the others
        self._found: deque[NextTokens] = deque()
        # Of the compiling thread:
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        # Of the matching thread:
        self._matches: dict[int, _Match] = {}

    def start(self, uid: int, source: str, end_ids: list[int]) -> None:
        self._active.add(uid)
        self._compiling.submit(self._guard, uid, self._compile, uid, source, end_ids)

    def advance(self, uid: int, token_id: int) -> None:
        if uid in self._active:
            self._matching.submit(self._guard, uid, self._follow, uid, token_id)

    def forget(self, uid: int) -> None:
        if uid in self._active:
            self._active.discard(uid)
            self._matching.submit(self._matches.pop, uid, None)

    def take(self) -> list[NextTokens]:
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def close(self) -> None:
        """Finish the work at hand and end the threads."""
        self._compiling.shutdown(cancel_futures=True)
        self._matching.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------ on the threads

    def _guard(self, uid: int, work: Callable[..., None], *arguments: Any) -> None:
        """Whatever goes wrong with one grammar ends one request."""
        try:
            work(*arguments)
        except OuroError as error:
            self._answer(NextTokens(uid, 0, error=str(error)))
        except BaseException as error:  # a panic in compiled code is no Exception
            logger.exception("the grammar of request %d failed", uid)
            self._answer(NextTokens(uid, 0, error=repr(error)))

    def _compile(self, uid: int, source: str, end_ids: list[int]) -> None:
        if uid not in self._active:
            return
        match = _Match(self._compiled_grammar(source).deep_copy(), _bits(end_ids))
        self._matching.submit(self._guard, uid, self._begin, uid, match)

    def _compiled_grammar(self, source: str) -> LLMatcher:
        """From the cache if it is there; a matcher that nobody advances."""
        # Not at the top of the file: it costs 12 MB, which a server without grammars does not need.
        from ouro_sgl.grammar import GrammarCompiler

        if self._compiler is None:
            self._compiler = GrammarCompiler(self._folder, self._vocab_size)
        if source not in self._compiled:
            self._compiled[source] = self._compiler.compile(source)
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return self._compiled[source]

    def _begin(self, uid: int, match: _Match) -> None:
        if uid in self._active:
            self._matches[uid] = match
            self._answer(self._next(uid, match))

    def _follow(self, uid: int, token_id: int) -> None:
        match = self._matches.get(uid)
        if match is not None:
            match.index += 1
            match.matcher.consume_token(token_id)
            self._answer(self._next(uid, match))

    def _next(self, uid: int, match: _Match) -> NextTokens:
        from ouro_sgl.grammar import GrammarError, check

        matcher = match.matcher
        bits = matcher.compute_bitmask()  # of a matcher that has failed: anything
        check(matcher)
        # The vocabulary's own ids; the one behind them stands for the end, which is looked at apart.
        mask = int.from_bytes(bits, "little") & self._all_ids
        complete = not mask
        if matcher.is_accepting():
            mask |= match.end_mask
        elif complete:
            raise GrammarError("no token of the vocabulary continues what the grammar asks for")
        return NextTokens(uid, match.index, mask.to_bytes(self._mask_bytes, "little"), complete)

    def _answer(self, found: NextTokens) -> None:
        self._found.append(found)
        self._wake()


@dataclass
class _Match:
    """One request: ``index`` output tokens are matched. Bit i of ``end_mask``: id i may end it."""

    matcher: LLMatcher
    end_mask: int
    index: int = 0


def _bits(ids: list[int]) -> int:
    mask = 0
    for token_id in ids:
        mask |= 1 << token_id
    return mask
