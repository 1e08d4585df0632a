"""Grammars that clients send: translated and tried out before the scheduler sees them.

Compiling can take any time and memory (a short schema may describe an automaton of millions of
states), so it happens in a process of its own that limits itself and may die of it: then the grammar
is refused, and the next one gets a new process. It starts with the first grammar. A process that somebody
else killed says nothing of the grammar, which is tried once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ouro_sgl.errors import RequestError
from ouro_sgl.launch import child_environment

KINDS = ("json_schema", "regex", "ebnf")
MAX_SOURCE_BYTES = 256 << 10
CACHED_VERDICTS = 64
END_SECONDS = 5.0  # from the end of its output to that of a process
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # by others: no limit of the process ends it so


class Grammar(msgspec.Struct, frozen=True):
    """``kind`` is the name of the request's field, ``source`` what it holds."""

    kind: str
    source: str


class Verdict(msgspec.Struct):
    """The grammar in llguidance's notation, or why there is none."""

    grammar: str | None = None
    error: str = ""


class GrammarTrial:
    """Tries grammars, one after the other.

    Args:
        folder: holds ``tokenizer.json``.
        vocab_size: rows of the model's embedding.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._command = [
            *(sys.executable, "-P", "-m", "ouro_sgl.frontend.grammar_process"),
            *(str(folder), str(vocab_size)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._verdicts: OrderedDict[Grammar, Verdict] = OrderedDict()

    async def translate(self, grammar: Grammar) -> str:
        """The grammar in llguidance's notation, known to compile.

        Raises:
            RequestError: it is wrong, or takes too much time or memory; names the field. Status 503: it could
                not be tried.
        """
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            loop = asyncio.get_running_loop()
            verdict = await loop.run_in_executor(self._thread, self._try, grammar)
            self._verdicts[grammar] = verdict
            if len(self._verdicts) > CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(grammar)
        if verdict.grammar is None:
            raise RequestError(f"{grammar.kind}: {verdict.error}")
        return verdict.grammar

    def close(self) -> None:
        """End the process; grammars that still wait for it are refused."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # the thread, should it wait for an answer, gets none
        self._thread.shutdown()
        if self._process is not None:
            self._process.kill()
            self._reap(self._process)

    def _try(self, grammar: Grammar) -> Verdict:
        """Blocks for as long as the process takes; it limits its own time.

        Raises:
            RequestError: status 503, nobody knows: the process cannot start, must not any more, was killed
                twice, or the machine was too busy.
        """
        tries = 0
        while not self._closed and tries < 2:
            tries += 1
            fresh = self._process is None
            process = self._process = self._process or subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                process_group=0,  # Ctrl-C reaches the parent alone
            )
            # Once more, as the process is known now: either this or ``close`` sees the other.
            if self._closed:
                break
            answer = b""
            assert process.stdin is not None
            assert process.stdout is not None
            if fresh and not process.stdout.readline():
                self._process = None
                self._reap(process)
                raise RequestError(f"{grammar.kind}: the process that tries grammars cannot start", 503)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(grammar) + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            if answer:
                return msgspec.json.decode(answer, type=Verdict)
            self._process = None
            status = self._reap(process)
            if status == -signal.SIGALRM:
                raise RequestError(f"{grammar.kind}: the machine is too busy to try the grammar", 503)
            if status not in KILLED:
                return Verdict(error="the grammar is too complex: compiling it takes too much time or memory")
        why = "the server is shutting down" if self._closed else "the process that tries grammars was killed"
        raise RequestError(f"{grammar.kind}: {why}", 503)

    @staticmethod
    def _reap(process: subprocess.Popen[bytes]) -> int:
        """Exit status of a process that is about to end, or is made to."""
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        return process.returncode
