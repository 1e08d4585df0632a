"""Where an answer ends, why, and what of its end is shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.reports.support import (
    CHAT,
    COMPLETIONS,
    END,
    LONG,
    NATIVE,
    PARIS,
    TURN_END,
    Client,
    digits,
    greedy,
    message,
    wait_for,
)
from tests.models import byte_ids


def test_stp_01_a_stop_string_over_several_tokens(script: Client) -> None:
    stops = greedy(20, stop=["DEF"])
    stream = script.stream_text("s", stops)
    assert stream.text() == "abc" == script.generate("s", stops)["text"]
    assert not any("D" in chunk["text"] for chunk in stream.chunks)
    assert stream.chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "DEF"}
    assert stream.chunks[-1]["meta_info"]["completion_tokens"] == len("abcDEF")
    body = {"prompt": "s", "temperature": 0, "max_tokens": 20, "stop": ["DEF"]}
    pieces = script.stream(COMPLETIONS, body)
    assert "".join(pieces.deltas()) == "abc"
    assert pieces.chunks[-1]["choices"][0]["finish_reason"] == "stop"

    # What might have become a stop string is shown once it did not.
    assert script.stream_text("s", greedy(20, stop=["DEX"])).text() == "abcDEFg"
    assert "".join(script.stream(COMPLETIONS, {**body, "stop": ["DEX"]}).deltas()) == "abcDEFg"
    assert script.stream_text("s", greedy(5, stop=["DEF"])).text() == "abcDE"


@pytest.mark.parametrize(
    ("stop", "text", "matched", "tokens"),
    [("Pari", "", "Pari", 1), ("ari", "P", "ari", 1), ("Paris!", "Paris", TURN_END, 2)],
)
def test_stp_03_a_stop_string_inside_a_token(
    script: Client, stop: str, text: str, matched: str | int, tokens: int
) -> None:
    for answer in (
        script.generate("q", greedy(8, stop=stop)),
        script.stream_text("q", greedy(8, stop=stop)).finish()[-1],
    ):
        assert answer["text"] == text
        assert answer["output_ids"] == [PARIS, TURN_END][:tokens]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        assert answer["meta_info"]["completion_tokens"] == tokens


@pytest.mark.parametrize(
    ("stop", "cut", "kept", "tokens"),
    [
        ({"stop": "."}, "", ".", 1),
        ({"stop_token_ids": byte_ids(".")}, "", ".", 1),
        ({}, ".", ".<|im_end|>", 2),
    ],
)
def test_stp_06_the_stop_is_cut_or_kept(
    script: Client, stop: dict[str, Any], cut: str, kept: str, tokens: int
) -> None:
    for no_stop_trim, text in ((False, cut), (True, kept)):
        params = greedy(8, skip_special_tokens=False, no_stop_trim=no_stop_trim, **stop)
        for answer in (script.generate("w", params), script.stream_text("w", params).finish()[-1]):
            assert answer["text"] == text
            assert answer["meta_info"]["completion_tokens"] == tokens


Y, Z = byte_ids("yz")


@pytest.mark.parametrize("prompt", ["z", 19 * "a" + "z"], ids=["1 token", "20 tokens"])
@pytest.mark.parametrize("stop_token_ids", [None, [Y]])
def test_stp_08_a_minimum_holds_back_every_end(
    script: Client, prompt: str, stop_token_ids: list[int] | None
) -> None:
    """After "z" come, by preference, one end token, the other one, "y" and "z"."""
    minimum = greedy(12, min_new_tokens=5, stop_token_ids=stop_token_ids)
    held, free = script.generate([prompt, prompt], [minimum, greedy(12)])
    assert held["output_ids"][:5] == ([Z] * 5 if stop_token_ids else [Y, *held["output_ids"][1:5]])
    assert not {END, TURN_END, *(stop_token_ids or ())} & set(held["output_ids"][:5])
    assert held["meta_info"]["completion_tokens"] >= 5
    if stop_token_ids:
        assert held["output_ids"] == [Z] * 5 + [END]
    assert free["output_ids"] == [END]


def test_stp_08_a_tokenizer_without_an_end(bare: Client) -> None:
    """No end token anywhere: a minimum is then no fault, and a request's own end is still held back."""
    plain, held = bare.generate(
        [LONG, LONG],
        [greedy(12, min_new_tokens=5), greedy(12, min_new_tokens=5, stop_token_ids=byte_ids("6"))],
    )
    assert plain["text"] == digits(12)
    assert byte_ids("6")[0] not in held["output_ids"][:5]
    assert len(held["output_ids"]) >= 5


def test_stp_09_an_end_on_the_last_allowed_token(script: Client, queue: Client) -> None:
    """The text, reason and count do not depend on the way a request took. Length is tested first."""
    params = greedy(4)
    answers = [
        script.generate("1", params),
        script.stream_text("1", params).finish()[-1],
        *script.generate(["1", LONG, "1"], params)[::2],
        queue.generate("1", params),  # several rounds ahead of the host
        script.generate("1", {**params, "stop": ["never"]}),
        script.generate("1", params, return_logprob=True),
    ]
    for answer in answers:
        assert answer["text"] == "234"
        assert answer["output_ids"] == [*byte_ids("234"), END]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    for path, body in ((COMPLETIONS, {"prompt": "1", "temperature": 0, "max_tokens": 4}),):
        assert script.post(path, body).json()["choices"][0]["text"] == "234"
        assert "".join(script.stream(path, body).deltas()) == "234"


def test_stp_10_no_new_tokens(rand: Client) -> None:
    assert rand.is_idle()
    free = rand.state()["free_slots"]
    body = {
        "text": "hello",
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0},
    }
    two = {**body, "sampling_params": {"max_new_tokens": 0, "n": 2}}
    answers = [rand.post(NATIVE, body).json() for _ in range(40)]
    answers += rand.post(NATIVE, two).json()
    answers.append(rand.stream(NATIVE, body).finish()[-1])
    for answer in answers:
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] == len("hello")
        assert meta["input_token_logprobs"] == answers[0]["meta_info"]["input_token_logprobs"]
        assert meta["output_token_logprobs"] == []
        assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert rand.is_idle()
    assert rand.state()["free_slots"] == free


def test_stp_12_the_length_when_none_is_given(script: Client, narrow: Client) -> None:
    greedy_params = {"temperature": 0, "ignore_eos": True}
    assert script.generate("l", greedy_params)["meta_info"]["completion_tokens"] == 128
    stream = script.stream_text("l", {**greedy_params, "max_new_tokens": None}).wait_chunks()
    assert wait_for(lambda: stream.chunks[-1]["meta_info"]["completion_tokens"] > 128)
    stream.close()
    # Up to the context, where there is not so much of it.
    for params in (greedy_params, {**greedy_params, "max_new_tokens": None}):
        meta = narrow.generate("l", params)["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (1, 63)
        assert meta["finish_reason"]["type"] == "length"
    chat = narrow.post(CHAT, {"messages": message(), **greedy_params}).json()
    assert chat["usage"]["total_tokens"] == 64
    assert chat["choices"][0]["finish_reason"] == "length"
