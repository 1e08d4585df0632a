"""Sampling parameters: which are refused, and what company does to the others (nothing)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.reports.support import (
    CHAT,
    COMPLETIONS,
    NATIVE,
    SCRIPT_VOCAB,
    Client,
    greedy,
    message,
    strict_json,
)

NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "1e400"])
def test_sam_01_numbers_that_are_none(script: Client, word: str) -> None:
    for name in NUMBERS:
        for path, body in (
            (NATIVE, f'{{"text":"a","sampling_params":{{"max_new_tokens":1,"{name}":{word}}}}}'),
            (COMPLETIONS, f'{{"prompt":"a","max_tokens":1,"{name}":{word}}}'),
            (CHAT, f'{{"messages":[{{"role":"user","content":"a"}}],"max_tokens":1,"{name}":{word}}}'),
        ):
            response = script.post_raw(path, body.encode())
            assert response.status_code == 400, body
            assert strict_json(response.content)
    assert script.generate("s", greedy(3))["text"] == "abc"


# Field, bad values, good values; and the name of the field on the OpenAI routes.
LIMITS: list[tuple[str, list[Any], list[Any], str | None]] = [
    ("temperature", [-0.1, "1", True], [0, 1e-7, 1, 100, None], "temperature"),
    ("top_p", [0, -1, 1.0001, "x"], [1e-9, 0.5, 1, None], "top_p"),
    ("top_k", [0, -2, 1.5], [-1, 1, 2**31 - 1, None], "top_k"),
    ("min_p", [-0.1, 1.1, []], [0, 1, None], "min_p"),
    ("frequency_penalty", [-2.01, 2.01], [-2, 0, 2, None], "frequency_penalty"),
    ("presence_penalty", [-2.01, 2.01], [-2, 0, 2, None], "presence_penalty"),
    ("repetition_penalty", [0, 2.01, -1], [0.01, 1, 2, None], "repetition_penalty"),
    ("min_new_tokens", [-1, 5, 1.5, 2**70], [0, 4, None], "min_tokens"),
    ("max_new_tokens", [-1, 1.5, "4", 2**70], [1, 4], "max_tokens"),
    ("n", [0, -1, 1.5, 2**70], [1, 2, None], "n"),
    ("stop", [5, [5], [None], ["x"] * 33, ""], [[], "x", ["x"] * 32, None], "stop"),
    ("stop_token_ids", [[-1], [SCRIPT_VOCAB], ["1"], 5], [[], [0], None], "stop_token_ids"),
    ("sampling_seed", [2**63, -(2**63) - 1, 1.5, "1"], [0, -1, 2**63 - 1, -(2**63), None], "seed"),
    ("logit_bias", [{"a": 1}, {"-1": 1}, {str(SCRIPT_VOCAB): 1}, 5], [{}, {"5": 1.5}, None], "logit_bias"),
    ("ignore_eos", [1, "yes"], [True, False, None], "ignore_eos"),
    ("max_loops", [0, 5], [1, 4, None], "max_loops"),
    ("exit_threshold", [-0.1, 1.1], [0, 1, None], "exit_threshold"),
]


@pytest.mark.parametrize(("name", "bad", "good", "openai"), LIMITS, ids=[entry[0] for entry in LIMITS])
def test_sam_02_limits(
    script: Client, name: str, bad: list[Any], good: list[Any], openai: str | None
) -> None:
    for values, status in ((bad, 400), (good, 200)):
        for value in values:
            params = {"max_new_tokens": 4, name: value}
            response = script.post(NATIVE, {"text": "s", "sampling_params": params})
            assert response.status_code == status, (params, response.text)
            if status == 400:
                assert name in response.text, response.text
            bodies: list[tuple[str, dict[str, Any]]] = [
                (COMPLETIONS, {"prompt": "s", "max_tokens": 4, openai: value}),
                (CHAT, {"messages": message(), "max_tokens": 4, openai: value}),
            ]
            for path, body in bodies:
                response = script.post(path, body)
                assert response.status_code == status, (body, response.text)


def test_sam_02_null_is_the_default(script: Client) -> None:
    names = [
        entry[0] for entry in LIMITS if entry[0] not in ("max_new_tokens", "temperature", "sampling_seed")
    ]
    plain = script.generate("s", {"sampling_seed": 3})
    nulls = script.generate("s", {"sampling_seed": 3, "temperature": None, **dict.fromkeys(names)})
    assert nulls["output_ids"] == plain["output_ids"]
    for unknown in ("max_tokens", "temprature", "top-k"):
        assert script.post(NATIVE, {"text": "s", "sampling_params": {unknown: 1}}).status_code == 400


# After "u" every token is as likely as any other; the greedy choice is the lowest id.
ANY = "u"


def test_sam_05_neighbours_with_other_limits(script: Client) -> None:
    params = [
        {"temperature": 1, "top_k": 1},
        {"temperature": 1},
        {"temperature": 1, "top_k": 1_000_000_000},
        {"temperature": 1, "top_k": SCRIPT_VOCAB + 1},
        {"temperature": 1, "top_p": 1e-9},
        {"temperature": 0},
        {"temperature": 1, "min_p": 1, "top_k": 1},
    ]
    params = [{"max_new_tokens": 3, "ignore_eos": True, **entry} for entry in params]
    seen: list[set[int]] = [set() for _ in params]
    for number in range(12):
        calls = [lambda entry=entry: script.generate(ANY, entry) for entry in params]
        answers = script.at_once(calls) if number % 2 else script.generate([ANY] * len(params), params)
        for tokens, answer in zip(seen, answers, strict=True):
            tokens.add(answer["output_ids"][0])
    for index in (0, 4, 5, 6):
        assert seen[index] == {0}
    for index in (1, 2, 3):
        assert len(seen[index]) > 6  # of twelve draws from some 260


def test_sam_06_seeds(script: Client) -> None:
    def ask(seed: int | None, **others: Any) -> list[int]:
        params = {"temperature": 1, "max_new_tokens": 4, "ignore_eos": True, "sampling_seed": seed, **others}
        ids: list[int] = script.generate(ANY, params)["output_ids"]
        return ids

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert len({tuple(ask(None)) for _ in range(5)}) > 1  # after most tokens comes one of them alone
    assert ask(-(2**63)) == ask(-(2**63))
    company = [lambda: ask(None, max_new_tokens=40) for _ in range(6)]
    for answers in (script.at_once([*company, lambda: ask(1)]), script.at_once([lambda: ask(1), *company])):
        assert ask(1) in answers

    params = {"temperature": 1, "max_new_tokens": 4, "ignore_eos": True, "sampling_seed": 1, "n": 4}
    samples = [answer["output_ids"] for answer in script.generate(ANY, params)]
    assert len({tuple(ids) for ids in samples}) == 4
    assert samples[0] == ask(1)
    assert samples == [answer["output_ids"] for answer in script.generate(ANY, params)]

    body = {"prompt": ANY, "max_tokens": 4, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    assert script.post(COMPLETIONS, body).json()["choices"][0]["token_ids"] == ask(1)
