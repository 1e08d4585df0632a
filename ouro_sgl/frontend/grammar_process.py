"""The process that tries out grammars: an empty line once it is ready, then one JSON line in, one out.

Run as ``python -m ouro_sgl.frontend.grammar_process FOLDER VOCAB_SIZE``. A grammar that exceeds the
limits ends the process, which is its parent's sign. So does the end of standard input.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark
from setproctitle import setproctitle

from ouro_sgl.frontend.grammar import Grammar, Verdict
from ouro_sgl.grammar import GrammarCompiler, GrammarError, check, one_line

CPU_SECONDS = 0.8  # of one grammar
WALL_SECONDS = 15.0  # a machine so busy that the above takes this long
MEMORY_BYTES = 1 << 30  # address space of this process
STEPS = 4  # tokens of a trial


def translate(kind: str, source: str) -> str:
    """A client's grammar in llguidance's notation; not yet compiled.

    A regex stands for whole outputs. Of a JSON schema, ``oneOf`` is taken as ``anyOf``.

    Raises:
        GrammarError: it cannot be translated.
    """
    if kind == "regex":
        if (len(source) - len(source.rstrip("\\"))) % 2:
            raise GrammarError("the last backslash escapes nothing")
        return LLMatcher.grammar_from_regex(source)
    if kind == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(source, defaults={"coerce_one_of": True})
        except ValueError as error:
            raise GrammarError(one_line(str(error))) from None
    try:
        # The converter raises bare Exception, and whatever its parser runs into.
        return LLMatcher.grammar_from_lark(gbnf_to_lark(source))
    except Exception as error:
        raise GrammarError(one_line(str(error)) or type(error).__name__) from None


def try_out(compiler: GrammarCompiler, grammar: Grammar) -> Verdict:
    """Compile, and take a few steps: much of the work of a large grammar is done by the first ones."""
    try:
        translated = translate(grammar.kind, grammar.source)
        matcher = compiler.compile(translated)
        for _ in range(STEPS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            check(matcher)
            if matcher.is_stopped():
                break
            matcher.consume_token((mask & -mask).bit_length() - 1)  # the lowest id that may come
    except GrammarError as error:
        return Verdict(error=str(error))
    return Verdict(translated)


def main(folder: Path, vocab_size: int) -> None:
    setproctitle("ouro_sgl::grammar")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compiler = GrammarCompiler(folder, vocab_size)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        grammar = msgspec.json.decode(line, type=Grammar)
        # Nobody handles these signals: they end the process, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        verdict = try_out(compiler, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
