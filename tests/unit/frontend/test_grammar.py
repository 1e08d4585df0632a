"""Grammars of clients: what is taken, what is refused and why, and that a bomb costs one process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.grammar import Grammar, GrammarTrial
from ouro_sgl.frontend.grammar_process import WALL_SECONDS
from tests.models import byte_tokenizer


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarTrial]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    trial = GrammarTrial(folder, 300)
    yield trial
    trial.close()


GOOD: list[tuple[str, Any]] = [
    ("regex", "a*"),
    ("regex", "()"),
    ("regex", "(娃娃领|高领)"),
    ("regex", "[一-龥]{3}"),
    ("regex", r"\[\"(高领|翻领)\"\]"),
    ("regex", r"a/b\\"),
    ("regex", "a\nb"),
    ("regex", "a{500}"),
    ("ebnf", 'root ::= "yes" | "no"'),
    ("ebnf", 'root ::= item ("," item)*\nitem ::= [a-z]+ | "[" root "]"'),
    ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    ("json_schema", {"enum": [f"value {i}" for i in range(5000)]}),
    (
        "json_schema",
        {"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"},
    ),
    ("json_schema", {"oneOf": [{"type": "string"}, {"type": "integer"}]}),
]

BAD: list[tuple[str, str]] = [
    *[
        ("regex", pattern)
        for pattern in ("[", "(?P<x", "a{2,1}", "\\", "a\\\\\\", "(?=a)b", r"(a)\1", "(" * 3000)
    ],
    *[("json_schema", text) for text in ("{", "5", '{"type":"nope"}', '{"not_a_keyword_at_all', "[]", "nul")],
    ("json_schema", '{"a":' * 3000 + "1" + "}" * 3000),
    *[
        ("ebnf", text)
        for text in ("x", 'root ::= "a" b', 'root ::= "a\\', "root ::= " + "(" * 5000, "a ::= ")
    ],
]


def multiples() -> dict[str, Any]:
    """An automaton with some hundred thousand states."""
    return {"type": "integer", "allOf": [{"multipleOf": n} for n in (97, 89, 83)]}


BOMBS: list[tuple[str, str]] = [
    ("regex", "((a{1000}){1000}){1000}"),
    ("regex", "a{1000000000}"),
    ("json_schema", json.dumps(multiples())),
    ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(8000)}})),
]


@pytest.mark.parametrize(("kind", "source"), GOOD, ids=range(len(GOOD)))
async def test_good_grammars_are_translated(trial: GrammarTrial, kind: str, source: Any) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    assert await trial.translate(Grammar(kind, text))


@pytest.mark.parametrize(("kind", "source"), BAD, ids=range(len(BAD)))
async def test_bad_grammars_are_refused_with_their_field(trial: GrammarTrial, kind: str, source: str) -> None:
    for _ in range(2):  # a verdict that is remembered is the same
        with pytest.raises(RequestError, match=f"^{kind}: .") as refusal:
            await trial.translate(Grammar(kind, source))
        assert refusal.value.status == 400
        assert len(refusal.value.message) < 400


@pytest.mark.parametrize(("kind", "source"), BOMBS, ids=range(len(BOMBS)))
async def test_bombs_are_refused_in_bounded_time(trial: GrammarTrial, kind: str, source: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match=f"^{kind}: "):
        await trial.translate(Grammar(kind, source))
    assert time.monotonic() - start < 5 * WALL_SECONDS
    assert await trial.translate(Grammar("regex", "afterwards"))


async def test_verdicts_are_remembered_and_the_process_ends(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    trial = GrammarTrial(tmp_path, 300)
    first = await trial.translate(Grammar("regex", "abc"))
    assert trial._process is not None
    pid = trial._process.pid
    trial._process.kill()
    assert await trial.translate(Grammar("regex", "abc")) == first
    assert trial._process.pid == pid
    assert await trial.translate(Grammar("regex", "abcd"))  # whoever killed it, it was not this one
    assert trial._process.pid != pid
    trial.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


ENDS = {
    "killed": "print(flush=True); input(); os.kill(os.getpid(), signal.SIGKILL)",
    "too busy": "print(flush=True); input(); os.kill(os.getpid(), signal.SIGALRM)",
    "cannot start": "raise ImportError",
}


@pytest.mark.parametrize("words", ENDS)
async def test_what_is_not_the_grammar_s_fault_is_503_and_not_remembered(tmp_path: Path, words: str) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    trial = GrammarTrial(tmp_path, 300)
    command = trial._command
    trial._command = [sys.executable, "-c", f"import os, signal; {ENDS[words]}"]
    with pytest.raises(RequestError, match=f"^regex: .*{words}") as refusal:
        await trial.translate(Grammar("regex", "abc"))
    assert refusal.value.status == 503
    trial._command = command
    assert await trial.translate(Grammar("regex", "abc"))
    trial.close()
    with pytest.raises(RequestError, match="shutting down"):
        trial._try(Grammar("regex", "abcd"))
