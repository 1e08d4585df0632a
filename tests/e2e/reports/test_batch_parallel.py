"""Several prompts, several samples: shape, order, names and parameters of each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.reports.support import LONG, NATIVE, Client, digits, greedy

ANSWERS = {"s": "abcDEFg", "w": ".", "x": "😀k", "1": "234"}


@pytest.mark.parametrize("temperature", [0, 1])
def test_bat_01_shape_and_order(script: Client, temperature: float) -> None:
    params = {"temperature": temperature, "max_new_tokens": 12, "top_k": 1}
    one = script.generate("s", {**params, "n": 1})
    assert one["text"] == ANSWERS["s"]
    three = script.generate("s", {**params, "n": 3})
    assert [answer["text"] for answer in three] == [ANSWERS["s"]] * 3
    assert len({answer["meta_info"]["id"] for answer in three}) == 3
    four = script.generate(["s", "w"], {**params, "n": 2})
    assert [answer["text"] for answer in four] == [ANSWERS[prompt] for prompt in "ssww"]
    assert len({answer["meta_info"]["id"] for answer in four}) == 4
    many = script.generate(list("wx1s" * 6), params)
    assert [answer["text"] for answer in many] == [ANSWERS[prompt] for prompt in "wx1s" * 6]


def test_bat_01_streams_carry_an_index(script: Client) -> None:
    for body, expected in (
        ({"text": "s", "sampling_params": greedy(12, n=3)}, "sss"),
        ({"text": ["s", "w"], "sampling_params": greedy(12, n=2)}, "ssww"),
    ):
        texts: dict[int, str] = {}
        ended = []
        for chunk in script.stream(NATIVE, body).finish():
            index = chunk["index"]
            assert chunk["text"].startswith(texts.get(index, ""))
            texts[index] = chunk["text"]
            if chunk["meta_info"]["finish_reason"] is not None:
                ended.append(index)
        assert sorted(ended) == list(range(len(expected)))
        assert texts == {index: ANSWERS[prompt] for index, prompt in enumerate(expected)}
    single = script.stream_text("s", greedy(12)).finish()
    assert not any("index" in chunk for chunk in single)


def test_bat_03_names_of_a_batch(script: Client) -> None:
    def ask(rid: Any, n: int = 1, text: Any = ("s", "w")) -> Any:
        body = {"text": text, "rid": rid, "sampling_params": greedy(2, n=n)}
        response = script.post(NATIVE, body)
        if response.status_code != 200:
            return response.status_code
        return [answer["meta_info"]["id"] for answer in response.json()]

    for _ in range(2):  # a name is free again once its request has ended
        assert ask(["a", "b"]) == ["a", "b"]
        assert ask("job") == ["job_0", "job_1"]
        assert ask(["a"]) == 400
        assert ask(["a", "a"]) == 400
        assert ask(["a", "b", "c"]) == 400
        for rid in (["a", "b"], "job"):
            ids = ask(rid, n=2)
            assert len(set(ids)) == 4
            stem = rid if isinstance(rid, str) else ("a", "b")
            assert all(name.startswith(stem) for name in ids)
        assert len(set(ask("job", n=3, text="s"))) == 3
        assert ask("job", text=["s"]) == ["job_0"] or ask("job", text=["s"]) == ["job"]


def test_bat_04_parameters_of_each_item(script: Client) -> None:
    params: list[dict[str, Any]] = [
        greedy(1),
        greedy(5),
        greedy(9, stop=["c"]),
        {"max_new_tokens": 3, "temperature": 1, "top_k": 1},
    ]
    alone = [script.solo("s", entry) for entry in params]
    assert [answer["text"] for answer in alone] == ["a", "abcDE", "ab", "abc"]
    calls = [lambda entry=entry: script.generate("s", entry) for entry in params]
    for answers in (script.generate(["s"] * 4, params), script.at_once(calls)):
        for answer, other in zip(answers, alone, strict=True):
            for key in ("text", "output_ids"):
                assert answer[key] == other[key]
            for key in ("completion_tokens", "finish_reason"):
                assert answer["meta_info"][key] == other["meta_info"][key]
    mixed = script.generate(["s", "s"], greedy(4), return_logprob=[True, False])
    assert ["output_token_logprobs" in answer["meta_info"] for answer in mixed] == [True, False]


@pytest.mark.parametrize(
    ("texts", "params"),
    [
        (["s"] * 5 + ["a" * 9000] + ["s"] * 2, greedy(200)),
        (["s"] * 8, [greedy(200)] * 5 + [greedy(200, top_p=0)] + [greedy(200)] * 2),
        (["s"] * 5 + [""] + ["s"] * 2, greedy(200)),
        (["s"] * 8, greedy(9000)),
    ],
    ids=["too long", "top_p 0", "empty", "too many"],
)
def test_bat_06_one_bad_item(script: Client, texts: list[str], params: Any) -> None:
    rids = [f"bat-06-{index}" for index in range(8)]
    assert script.nothing_runs()
    requests = script.state()["requests"]
    response = script.post(NATIVE, {"text": texts, "rid": rids, "sampling_params": params})
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert script.nothing_runs()
    assert script.state()["requests"] == requests
    answers = script.generate([LONG] * 8, greedy(3), rid=rids)
    assert [answer["text"] for answer in answers] == [digits(3)] * 8
