"""Prompts that cannot be served, or only just: refused whole, and nobody else notices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.e2e.reports.support import COMPLETIONS, LONG, NATIVE, SCRIPT_VOCAB, Client, digits, greedy
from tests.models import byte_ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, {"text": ""}),
        (NATIVE, {"text": ["a", ""]}),
        (NATIVE, {"text": []}),
        (NATIVE, {"input_ids": []}),
        (NATIVE, {"input_ids": [[100], []]}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": [""]}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
    ],
    ids=str,
)
def test_inp_01_no_prompt(script: Client, path: str, body: dict[str, Any]) -> None:
    with script.unharmed(sampling=greedy(40)):
        response = script.post(path, body)
        assert response.status_code == 400
        error = response.json()
        assert error.get("message") or error["error"]["message"]


def test_inp_03_an_id_beyond_the_vocabulary(script: Client) -> None:
    last = SCRIPT_VOCAB - 1
    with script.unharmed(sampling=greedy(60)):
        assert len(script.generate([last], greedy(1))["output_ids"]) == 1
        answer = script.post(COMPLETIONS, {"prompt": [last], "max_tokens": 1, "temperature": 0})
        assert answer.status_code == 200
        for bad in (SCRIPT_VOCAB, SCRIPT_VOCAB + 1, 10**9, -1):
            for path, body in (
                (NATIVE, {"input_ids": [bad]}),
                (NATIVE, {"input_ids": [byte_ids(LONG), [5, bad]]}),
                (COMPLETIONS, {"prompt": [bad]}),
                (COMPLETIONS, {"prompt": [[5], [bad]]}),
            ):
                response = script.post(path, body)
                assert response.status_code == 400, body
                assert str(bad) in response.text
            assert script.generate(LONG, greedy(2))["text"] == digits(2)


@pytest.mark.parametrize(
    "ids",
    [
        "[2147483648]",
        "[9223372036854775808]",
        "[1180591620717411303424]",
        "[1.5]",
        "[true]",
        '["5"]',
        "[null]",
        "[[[1]]]",
        "[[1],2]",
        "[1,[2]]",
        "[NaN]",
        "[{}]",
        "{}",
        "5",
        '"5"',
    ],
)
def test_inp_05_ids_that_are_none(script: Client, ids: str) -> None:
    for path, body in ((NATIVE, f'{{"input_ids":{ids}}}'), (COMPLETIONS, f'{{"prompt":{ids}}}')):
        if path == COMPLETIONS and ids in ('["5"]', '"5"'):
            continue  # a text
        response = script.post_raw(path, body.encode())
        assert response.status_code == 400, body
        assert response.json()["message"] if "message" in response.json() else response.json()["error"]
    assert script.get("/health").status_code == 200


def test_inp_06_a_prompt_as_long_as_the_context(narrow: Client) -> None:
    for length in (50, *range(57, 66), 1000):
        ids = [100] * length
        native = narrow.post(NATIVE, {"input_ids": ids, "sampling_params": greedy(1)})
        completion = narrow.post(COMPLETIONS, {"prompt": ids, "max_tokens": 1, "temperature": 0})
        if length < 64:
            assert native.json()["meta_info"]["prompt_tokens"] == length
            assert native.json()["meta_info"]["completion_tokens"] == 1
            assert completion.json()["usage"]["prompt_tokens"] == length
        else:
            for response in (native, completion):
                assert response.status_code == 400
                assert str(length) in response.text
                assert "64" in response.text


def test_inp_08_a_prompt_as_long_as_a_limit(rand: Client, narrow: Client) -> None:
    """Around one chunk (16), the tokens of one step (32) and the context (64), alone and together."""
    rng = random.Random(8)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 62, 63]
    prompts = [[rng.randrange(3, 259) for _ in range(length)] for length in lengths]
    expected = [rand.generate(ids, greedy(1, logit_bias={"0": -100}))["output_ids"] for ids in prompts]
    several = [rand.generate(ids, greedy(6))["output_ids"] for ids in prompts[:-3]]
    for ids, output in zip(prompts, expected, strict=True):
        assert narrow.generate(ids, greedy(1, logit_bias={"0": -100}))["output_ids"] == output
    assert narrow.flush()
    together = narrow.generate(prompts[:-3], greedy(6))
    assert [answer["output_ids"] for answer in together] == several
