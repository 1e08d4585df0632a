"""Constrained requests over HTTP: what they answer, what is refused, and that nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import byte_ids, metaspace_tokenizer, rand_checkpoint, script_checkpoint
from tests.server import Server, running_server

PATIENCE = 200.0  # seconds for an answer on a busy machine
E_ID = byte_ids("e")[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A random model whose tokens leave after 1 to 4 loops; byte-level tokenizer."""
    model = rand_checkpoint(tmp_path_factory.mktemp("constrained") / "model", threshold=0.7)
    with running_server(model, "--max-running-requests", "36") as running:
        yield running


def ask(server: Server, text: str = "hello", **sampling: Any) -> dict[str, Any]:
    payload = {"text": text, "sampling_params": {"max_new_tokens": 60, "sampling_seed": 5, **sampling}}
    answer = server.post("/generate", payload, timeout=PATIENCE)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    return body


def reason(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["finish_reason"]
    return found


def snapshots(server: Server, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a stream."""
    with (
        httpx.Client(timeout=PATIENCE, trust_env=False) as client,
        client.stream("POST", server.url + "/generate", json={**payload, "stream": True}) as response,
    ):
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


# --------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{3,8}",
        "(娃娃领|高领)",
        "[一-龥]{3}",
        "(é|😀){2}",
        r"\[\"(高领|翻领)\"\]",
        r"\d{4}-\d{2}-\d{2}",
        "(yes|no|maybe) [a-z]/b",
        "a\nb{2}",
    ],
)
def test_con_04_a_regex_is_matched_whole(server: Server, pattern: str) -> None:
    for seed in (1, 2):
        payload = {
            "text": "hello",
            "sampling_params": {"max_new_tokens": 60, "regex": pattern, "sampling_seed": seed},
        }
        chunks = snapshots(server, payload)
        texts = [chunk["text"] for chunk in chunks]
        assert re.fullmatch(pattern, texts[-1])
        assert reason(chunks[-1])["type"] == "stop"
        assert reason(chunks[-1])["matched"] in (0, 2)
        for text in texts:
            assert texts[-1].startswith(text)
            assert "\ufffd" not in text


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "😀"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def check_person(value: Any) -> None:
    assert set(value) == {"name", "age", "tags", "ok"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 5
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "é", "😀"}
    assert isinstance(value["ok"], bool)


def test_a_json_schema_gives_json_of_it(server: Server) -> None:
    for seed, schema in enumerate([json.dumps(SCHEMA), SCHEMA, json.dumps(SCHEMA)]):
        answer = ask(server, json_schema=schema, sampling_seed=seed, max_new_tokens=200)
        assert reason(answer)["type"] == "stop"
        check_person(json.loads(answer["text"]))


def test_a_grammar_gives_its_sentences(server: Server) -> None:
    grammar = 'root ::= term (op term){2}\nterm ::= [0-9] | "(" term op term ")"\nop ::= "+" | "*"'
    for seed in range(3):
        answer = ask(server, ebnf=grammar, sampling_seed=seed, max_new_tokens=300)
        if reason(answer)["type"] == "stop":
            assert set(answer["text"]) <= set("0123456789+*()")
            assert isinstance(eval(answer["text"]), int)  # digits, brackets and two operators
    assert ask(server, ebnf='root ::= "yes" | "no"')["text"] in ("yes", "no")


def test_samples_and_batches_are_constrained_one_by_one(server: Server) -> None:
    shared = {"n": 3, "temperature": 50, "sampling_seed": 5, "max_new_tokens": 60}  # letters nearly uniform
    payload = {
        "text": ["hello", "world"],
        "sampling_params": [{**shared, "regex": "[ab]{40}x"}, {**shared, "regex": "[cd]{40}y"}],
    }
    answers = server.post("/generate", payload, timeout=PATIENCE).json()
    texts = [answer["text"] for answer in answers]
    assert all(re.fullmatch("[ab]{40}x", text) for text in texts[:3])
    assert all(re.fullmatch("[cd]{40}y", text) for text in texts[3:])
    assert len(set(texts)) == 6


def test_greedy_penalties_and_logprobs_work_within_the_mask(server: Server) -> None:
    payload = {
        "text": "hello",
        "return_logprob": True,
        "top_logprobs_num": 3,
        "sampling_params": {
            **{"temperature": 0.0, "regex": "[xyz]{5}", "repetition_penalty": 2.0, "frequency_penalty": 2.0},
            "logit_bias": {str(byte_ids("q")[0]): 1e9},
        },
    }
    answer = server.post("/generate", payload).json()
    assert re.fullmatch("[xyz]{5}", answer["text"])
    meta = answer["meta_info"]
    values = [value for value, _, _ in meta["output_token_logprobs"]]
    assert all(value > -20 for value in values)
    allowed = {*byte_ids("xyz")}
    for top in meta["output_top_logprobs"][:5]:
        assert {token for value, token, _ in top if value > -9000} <= allowed


# --------------------------------------------------------------------------- ends


def test_con_03_a_regex_that_may_be_empty(server: Server) -> None:
    assert ask(server, regex="()")["text"] == ""
    assert set(ask(server, regex="a*")["text"]) <= {"a"}
    assert ask(server, regex="()", ignore_eos=True)["output_ids"] == []
    plain = ask(server, regex="")  # none
    assert plain["output_ids"] == ask(server)["output_ids"]
    assert ask(server, json_schema="")["output_ids"] == plain["output_ids"]


def test_con_06_the_token_limit_cuts_a_match_short(server: Server) -> None:
    for limit in (10, 40):
        answer = ask(server, regex="a{500}", max_new_tokens=limit)
        assert answer["text"] == "a" * limit
        assert reason(answer) == {"type": "length", "length": limit}
        answer = ask(server, regex="[a-z]+ [a-z]+", max_new_tokens=limit)
        assert answer["meta_info"]["completion_tokens"] <= limit
        pattern = "[a-z]+ [a-z]+" if reason(answer)["type"] == "stop" else "[a-z]+( [a-z]*)?"
        assert re.fullmatch(pattern, answer["text"])


def test_con_08_stops_within_a_match(server: Server) -> None:
    answer = ask(server, regex="abcdef", stop="cd")
    assert (answer["text"], reason(answer)) == ("ab", {"type": "stop", "matched": "cd"})
    answer = ask(server, regex="abcdef", stop_token_ids=[E_ID])
    assert (answer["text"], reason(answer)) == ("abcd", {"type": "stop", "matched": E_ID})
    answer = ask(server, regex="abcdef", stop_regex="[d-f]{2}")
    assert (answer["text"], reason(answer)) == ("abc", {"type": "stop", "matched": "[d-f]{2}"})
    answer = ask(server, regex="abcdef", stop_token_ids=[E_ID], ignore_eos=True)
    assert (answer["text"], reason(answer)) == ("abcdef", {"type": "stop", "matched": None})
    answer = ask(server, regex="abc", min_new_tokens=20)
    assert (answer["text"], reason(answer)) == ("abc", {"type": "stop", "matched": None})
    answer = ask(server, regex="ab*", min_new_tokens=20, max_new_tokens=20)
    assert answer["text"] == "a" + "b" * 19


def test_con_08_an_aborted_text_begins_a_match(server: Server) -> None:
    rng = random.Random(3)
    for round_number in range(4):
        rid = f"abort-{round_number}"
        delay = rng.uniform(0.0, 0.25)
        timer = threading.Timer(delay, server.post, ("/abort_request", {"rid": rid}))
        timer.start()
        payload = {
            "text": "hello",
            "rid": rid,
            "sampling_params": {"max_new_tokens": 900, "regex": "(é[a-d]){450}", "ignore_eos": True},
        }
        last = snapshots(server, payload)[-1]
        timer.join()
        text, ends = last["text"], reason(last)["type"]
        assert ends in ("abort", "length", "stop")
        assert re.fullmatch("(é[a-d])*é?", text)


# --------------------------------------------------------------------------- refusals

BAD: list[tuple[dict[str, Any], str]] = [
    *[({"regex": pattern}, "regex: ") for pattern in ("[", "(?P<x", "a{2,1}", "\\", "(?=a)", r"(a)\1")],
    *[({"json_schema": text}, "json_schema: ") for text in ("{", "5", '{"type":"nope"}')],
    ({"json_schema": {"type": "nope"}}, "json_schema: "),
    ({"ebnf": "root ::= nowhere"}, "ebnf: "),
    ({"regex": "a", "json_schema": "{}"}, "cannot both"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "cannot both"),
    ({"json_schema": "{}", "ebnf": 'root ::= "a"'}, "cannot both"),
    ({"regex": 5}, "regex must be a string"),
    ({"regex": "a" * 300_000}, "regex must have at most"),
    ({"stop_regex": "("}, "stop_regex: "),
    ({"stop_regex": "a" * 300}, "stop_regex must have at most"),
]


def children(server: Server) -> dict[str, str]:
    """Process ids of the server's children, by title."""
    parent = server.process.pid
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just died
            found[Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")] = pid
    return found


def bomb(first: int) -> dict[str, Any]:
    return {"type": "integer", "allOf": [{"multipleOf": n} for n in (first, 89, 83)]}


def test_con_01_bad_grammars_are_refused_beside_a_stream_that_does_not_notice(server: Server) -> None:
    long = {
        "text": "hello",
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 300, "ignore_eos": True, "sampling_seed": 9},
    }

    def essence(answer: dict[str, Any]) -> list[Any]:
        meta = answer["meta_info"]
        return [answer["text"], answer["output_ids"], meta["exit_depths"], meta["output_token_logprobs"]]

    alone = essence(snapshots(server, long)[-1])
    processes = children(server)
    assert {"ouro_sgl::scheduler", "ouro_sgl::worker"} <= set(processes)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(snapshots, server, long)
        for sampling, message in BAD:
            for streamed in (False, True):
                payload = {"text": "hi", "sampling_params": sampling, "stream": streamed}
                answer = server.post("/generate", payload)
                assert answer.status == (200 if streamed else 400)
                assert message in answer.body.decode()
        for first in (97, 101):
            start = time.monotonic()
            answer = server.post("/generate", {"text": "hi", "sampling_params": {"json_schema": bomb(first)}})
            assert (answer.status, time.monotonic() - start < PATIENCE) == (400, True)
            assert "json_schema: the grammar is too complex" in answer.body.decode()
        assert essence(stream.result()[-1]) == alone
    assert ask(server, regex="after")["text"] == "after"
    after = children(server)
    for name in ("ouro_sgl::scheduler", "ouro_sgl::worker"):
        assert after[name] == processes[name]


# --------------------------------------------------------------------------- company


def test_31_free_requests_are_what_they_are_alone(server: Server) -> None:
    def free(number: int) -> dict[str, Any]:
        return {
            "text": f"free {number}",
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": 24,
                "ignore_eos": True,
                "temperature": 0.0 if number % 2 else 0.8,
                "sampling_seed": number,
            },
        }

    constrained = {
        "text": "bound",
        "sampling_params": {"max_new_tokens": 40, "json_schema": json.dumps(SCHEMA), "sampling_seed": 1},
    }

    def essence(answer: dict[str, Any]) -> list[Any]:
        meta = answer["meta_info"]
        return [answer["output_ids"], meta["exit_depths"], meta["output_token_logprobs"]]

    def run(payloads: list[dict[str, Any]]) -> list[list[Any]]:
        with ThreadPoolExecutor(len(payloads)) as pool:
            answers = pool.map(lambda payload: server.post("/generate", payload, timeout=PATIENCE), payloads)
            bodies = [answer.json() for answer in answers]
        return [
            essence(body) if "output_token_logprobs" in body["meta_info"] else [body["text"]]
            for body in bodies
        ]

    frees = [free(number) for number in range(31)]
    without = run(frees)
    beside = run([constrained, *frees])
    assert beside[1:] == without
    assert beside[:1] == run([constrained])


def test_con_06_a_tokenizer_whose_tokens_carry_spaces(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    chain: dict[int, list[int]] = {token: [] for token in range(tokenizer.get_vocab_size())}
    model = script_checkpoint(tmp_path / "model", chain, tokenizer=tokenizer)
    with running_server(model) as server:
        for seed in range(3):
            answer = ask(server, "the cat", regex="[a-z]+ [a-z]+", sampling_seed=seed, max_new_tokens=40)
            pattern = "[a-z]+ [a-z]+" if reason(answer)["type"] == "stop" else "[a-z]+( [a-z]*)?"
            assert re.fullmatch(pattern, answer["text"])
        assert ask(server, "the", regex="the cat sat")["text"] == "the cat sat"
        assert ask(server, "the", regex=" cat")["text"] == " cat"
        refused = server.post("/generate", {"text": "the", "sampling_params": {"regex": "é"}})
        assert refused.status == 400
        assert "no token of the vocabulary" in refused.body.decode()
