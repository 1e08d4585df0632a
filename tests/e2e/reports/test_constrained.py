"""Reported faults of constrained decoding."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.reports.conftest import Serve
from tests.e2e.reports.support import NATIVE, Client, greedy
from tests.models import byte_ids, metaspace_tokenizer, script_checkpoint

HOT = {"temperature": 100.0}  # nearly all that the constraint allows is as likely
ANSWER_SECONDS = 5 * 2.0  # for an edge case, with slack for a loaded machine

INVALID: list[dict[str, Any]] = [
    {"regex": "["},
    {"regex": "(?P<x"},
    {"regex": "a{2,1}"},
    {"regex": "\\"},
    {"regex": "(?=a)b"},
    {"regex": "(a)\\1"},
    {"json_schema": "{"},
    {"json_schema": "5"},
    {"json_schema": '{"type":"nope"}'},
    {"ebnf": 'root ::= ("a"'},
    {"regex": "a", "json_schema": "{}"},
    {"regex": "a", "ebnf": 'root ::= "a"'},
]


def test_con_01_an_invalid_constraint_is_ones_own_affair(script: Client) -> None:
    # The process that tries grammars starts with the first one; no bad one may end it.
    assert script.generate("5", greedy(4, regex="56"))["text"] == "56"
    with script.unharmed():
        for bad in INVALID:
            response = script.post(NATIVE, {"text": "5", "sampling_params": greedy(4, **bad)})
            assert response.status_code == 400, (bad, response.text)
            message = response.json()["error"]["message"]
            assert any(name in message for name in bad), message
        streamed = script.stream_text("5", greedy(4, regex="[")).finish()
        assert "regex" in streamed[0]["error"]["message"]


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": ""}, r"6789056789"),  # no constraint at all
        ({"json_schema": ""}, r"6789056789"),
        ({"regex": "()"}, r""),
        ({"regex": "a*"}, r"a*"),
    ],
)
def test_con_03_empty_constraints_are_answered(
    script: Client, constraint: dict[str, Any], pattern: str
) -> None:
    begin = time.monotonic()
    for ignore_eos in (False, True):
        answer = script.generate("5", greedy(10, ignore_eos=ignore_eos, **constraint))
        assert re.fullmatch(pattern, answer["text"])
    assert time.monotonic() - begin < ANSWER_SECONDS


@pytest.mark.parametrize("regex", ["(娃娃领|高领)", "[一-龥]{3}", "(é|😀){2}", r'\["(高领|翻领)"\]'])
def test_con_04_characters_of_several_bytes(rand: Client, regex: str) -> None:
    texts = set()
    for seed in range(6):
        sampling = {**HOT, "max_new_tokens": 40, "regex": regex, "sampling_seed": seed}
        stream = rand.stream_text("hello", sampling)
        text = stream.text()  # every piece extends the one before
        assert re.fullmatch(regex, text), text
        assert not any("\ufffd" in chunk["text"] for chunk in stream.chunks)
        assert rand.generate("hello", sampling)["text"] == text
        texts.add(text)
    assert len(texts) > 1


@pytest.fixture(scope="module")
def metaspace(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Every token is as likely as any other; spaces are marks of the tokenizer."""
    tokenizer = metaspace_tokenizer()
    chain: dict[int, list[int]] = {token: [] for token in range(tokenizer.get_vocab_size())}
    folder = script_checkpoint(tmp_path_factory.mktemp("metaspace") / "m", chain, tokenizer=tokenizer)
    return serve(folder, "--num-slots", "4096")


@pytest.mark.parametrize("server", ["rand", "metaspace"])
def test_con_06_the_token_limit_and_spaces(server: str, request: pytest.FixtureRequest) -> None:
    client: Client = request.getfixturevalue(server)
    stopped = 0
    for seed in range(6):
        for limit in (10, 40):
            sampling = {**HOT, "max_new_tokens": limit, "regex": "[a-z]+ [a-z]+", "sampling_seed": seed}
            answer = client.generate("say", sampling)
            text, meta = answer["text"], answer["meta_info"]
            assert meta["completion_tokens"] <= limit
            if meta["finish_reason"]["type"] == "stop":
                stopped += 1
                assert re.fullmatch("[a-z]+ [a-z]+", text), text
            else:
                assert meta["finish_reason"] == {"type": "length", "length": limit}
                assert re.fullmatch("[a-z]+( [a-z]*)?", text), text
    assert stopped
    for limit in (10, 40):
        answer = client.generate("say", greedy(limit, regex="a{500}"))
        assert answer["text"] == "a" * limit
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": limit}


def test_con_08_stops_inside_a_constraint(rand: Client) -> None:
    def ask(**others: Any) -> tuple[str, Any]:
        answer = rand.generate("hello", greedy(20, regex="abcdef", **others))
        return answer["text"], answer["meta_info"]["finish_reason"]

    assert ask(stop="cd") == ("ab", {"type": "stop", "matched": "cd"})
    (e,) = byte_ids("e")
    assert ask(stop_token_ids=[e]) == ("abcd", {"type": "stop", "matched": e})
    text, reason = ask()
    assert (text, reason["type"]) == ("abcdef", "stop")
    # Nothing may follow, and no end token either: the end of the grammar is the end.
    text, reason = ask(ignore_eos=True)
    assert (text, reason["type"]) == ("abcdef", "stop")


def test_con_08_an_aborted_text_begins_a_match(rand: Client) -> None:
    rng = random.Random(8)
    word = "abcdefghij" * 60

    def one(number: int, wait: float) -> Callable[[], Any]:
        def call() -> Any:
            sampling = greedy(600, regex="(abcdefghij){60}", ignore_eos=True)
            stream = rand.stream_text("hello", sampling, rid=f"constrained-{number}").wait_chunks()
            time.sleep(wait)
            rand.abort(rid=f"constrained-{number}")
            return stream.finish()[-1]

        return call

    answers = rand.at_once([one(number, 0.3 * rng.random()) for number in range(8)])
    assert all(answer["text"] for answer in answers)
    assert "abort" in {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    for answer in answers:
        assert word.startswith(answer["text"])
    assert rand.is_idle()
