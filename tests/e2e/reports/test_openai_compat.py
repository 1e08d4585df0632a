"""What clients of the OpenAI routes rely on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.reports.support import (
    CHAT,
    CHAT_ANSWER,
    COMPLETIONS,
    LONG,
    NATIVE,
    Client,
    digits,
    greedy,
    message,
)
from tests.models import byte_ids

ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "s"}),
    (CHAT, {"messages": message()}),
]
IDS = ["completions", "chat"]
TEMPLATED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def text_of(choice: Any) -> Any:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(("path", "asked"), ASKED, ids=IDS)
@pytest.mark.parametrize("n", [1, 2])
def test_oai_01_usage_of_a_stream(script: Client, path: str, asked: dict[str, Any], n: int) -> None:
    body = {**asked, "temperature": 0, "max_tokens": 20, "n": n}
    expected = script.post(path, body).json()["usage"]
    one = script.post(path, {**body, "n": 1}).json()["usage"]
    assert expected["prompt_tokens"] == one["prompt_tokens"]
    assert expected["completion_tokens"] == n * one["completion_tokens"]
    assert expected["total_tokens"] == expected["prompt_tokens"] + expected["completion_tokens"]
    *chunks, last = script.stream(path, {**body, "stream_options": {"include_usage": True}}).finish()
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == expected[name]
    assert chunks
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        for chunk in script.stream(path, {**body, **options}).finish():
            assert chunk["choices"]
            assert chunk.get("usage") is None


@pytest.mark.parametrize(("path", "asked"), ASKED, ids=IDS)
@pytest.mark.parametrize(("max_tokens", "reason"), [(20, "stop"), (2, "length")])
def test_oai_02_the_reason_comes_once_and_last(
    script: Client, path: str, asked: dict[str, Any], max_tokens: int, reason: str
) -> None:
    body = {**asked, "temperature": 0, "max_tokens": max_tokens, "n": 2}
    reasons: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in script.stream(path, body).finish():
        assert isinstance(chunk["id"], str)
        assert isinstance(chunk["created"], int)
        assert chunk["object"] == ("text_completion" if path == COMPLETIONS else "chat.completion.chunk")
        for choice in chunk["choices"]:
            if path == CHAT and not reasons[choice["index"]]:
                assert choice["delta"]["role"] == "assistant"
            reasons[choice["index"]].append(choice["finish_reason"])
    for told in reasons.values():
        assert told == [None] * (len(told) - 1) + [reason]


def test_oai_05_a_chat_without_a_template(bare: Client) -> None:
    response = bare.post(CHAT, {"messages": message()})
    assert response.status_code == 400
    assert "chat template" in response.json()["message"]
    assert bare.stream(CHAT, {"messages": message()}).finish()[-1]["code"] == 400
    assert bare.generate(LONG, greedy(4))["text"] == digits(4)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [{}],
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}],
        [{"role": "nobody", "content": "hi"}],
        [{"role": None, "content": "hi"}],
        ["hi"],
    ],
    ids=str,
)
def test_oai_05_bad_messages(script: Client, messages: Any) -> None:
    response = script.post(CHAT, {"messages": messages, "max_tokens": 4})
    assert response.status_code == 400
    assert response.json()["object"] == "error"
    assert response.json()["message"]
    assert "Traceback" not in response.text


def test_oai_05_parts_of_a_text(script: Client) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    joined = script.post(CHAT, {"messages": [{"role": "user", "content": parts}], "temperature": 0}).json()
    plain = script.post(CHAT, {"messages": message("hi there"), "temperature": 0}).json()
    assert text_of(joined["choices"][0]) == CHAT_ANSWER
    assert joined["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "asked", "limit", "reason", "tokens", "text"),
    [
        (COMPLETIONS, {"prompt": "s"}, 20, "stop", 8, "abcDEFg"),
        (COMPLETIONS, {"prompt": "s"}, 3, "length", 3, "abc"),
        (CHAT, {"messages": message()}, 20, "stop", 3, CHAT_ANSWER),
        (CHAT, {"messages": message()}, 1, "length", 1, CHAT_ANSWER[0]),
    ],
)
def test_oai_06_reason_usage_and_object(
    script: Client, path: str, asked: dict[str, Any], limit: int, reason: str, tokens: int, text: str
) -> None:
    body = {**asked, "temperature": 0, "max_tokens": limit}
    answer = script.post(path, body).json()
    (choice,) = answer["choices"]
    assert answer["object"] == ("text_completion" if path == COMPLETIONS else "chat.completion")
    assert (text_of(choice), choice["finish_reason"]) == (text, reason)
    prompt_tokens = (
        1 if path == COMPLETIONS else len(script.post("/tokenize", {"prompt": TEMPLATED}).json()["tokens"])
    )
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert list(usage.values()) == [prompt_tokens, tokens, prompt_tokens + tokens]
    stream = script.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert "".join(stream.deltas()) == text
    name = "text_completion" if path == COMPLETIONS else "chat.completion.chunk"
    assert {chunk["object"] for chunk in stream.chunks} == {name}
    assert stream.chunks[-1]["usage"]["completion_tokens"] == tokens
    assert stream.chunks[-2]["choices"][0]["finish_reason"] == reason


# Fields of the OpenAI routes beside those of /generate.
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_new_tokens": 20}),
    ({"stop": None}, {"max_new_tokens": 20, "stop": None}),
    ({"max_tokens": 2}, {"max_new_tokens": 2}),
    ({"ignore_eos": True}, {"max_new_tokens": 20, "ignore_eos": True}),
    (
        {"ignore_eos": True, "skip_special_tokens": False},
        {"max_new_tokens": 20, "ignore_eos": True, "skip_special_tokens": False},
    ),
    ({"stop_token_ids": byte_ids("bi")}, {"max_new_tokens": 20, "stop_token_ids": byte_ids("bi")}),
    (
        {"stop_token_ids": byte_ids("bi"), "no_stop_trim": True},
        {"max_new_tokens": 20, "stop_token_ids": byte_ids("bi"), "no_stop_trim": True},
    ),
    ({"stop": ["b", "i"]}, {"max_new_tokens": 20, "stop": ["b", "i"]}),
    (
        {"stop": ["b", "i"], "no_stop_trim": True},
        {"max_new_tokens": 20, "stop": ["b", "i"], "no_stop_trim": True},
    ),
    ({"stop_regex": "[bi]"}, {"max_new_tokens": 20, "stop_regex": "[bi]"}),
    ({"temperature": 1, "top_k": 1}, {"max_new_tokens": 20, "temperature": 1, "top_k": 1}),
    ({"temperature": 1, "min_p": 1}, {"max_new_tokens": 20, "temperature": 1, "min_p": 1}),
    ({"temperature": 1, "top_p": 1e-9}, {"max_new_tokens": 20, "temperature": 1, "top_p": 1e-9}),
    ({"min_tokens": 12}, {"max_new_tokens": 20, "min_new_tokens": 12}),
    ({"regex": "[a-cA-Z]+i?"}, {"max_new_tokens": 20, "regex": "[a-cA-Z]+i?"}),
    ({"logit_bias": {"5": 1000}}, {"max_new_tokens": 20, "logit_bias": {"5": 1000}}),
    ({"frequency_penalty": 2}, {"max_new_tokens": 20, "frequency_penalty": 2}),
    ({"repetition_penalty": 1.5}, {"max_new_tokens": 20, "repetition_penalty": 1.5}),
    ({"max_loops": 1}, {"max_new_tokens": 20, "max_loops": 1}),
]


@pytest.mark.parametrize(("fields", "native"), FIELDS, ids=[str(fields) for fields, _ in FIELDS])
def test_oai_08_a_field_does_the_same_everywhere(
    script: Client, fields: dict[str, Any], native: dict[str, Any]
) -> None:
    for path, asked, text in (
        (COMPLETIONS, {"prompt": "s"}, "s"),
        (CHAT, {"messages": message()}, TEMPLATED),
    ):
        body = {**asked, "temperature": 0, "max_tokens": 20, **fields}
        expected = script.generate(text, {"temperature": 0, **native})
        answer = script.post(path, body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        reason = expected["meta_info"]["finish_reason"]
        assert text_of(choice) == expected["text"]
        assert choice["finish_reason"] == reason["type"]
        assert choice["matched_stop"] == reason.get("matched")
        assert answer.json()["usage"]["completion_tokens"] == expected["meta_info"]["completion_tokens"]
        assert "".join(script.stream(path, body).deltas()) == expected["text"]


def test_oai_08_both_names_of_the_length(script: Client) -> None:
    for fields, tokens in (
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 9, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 2, "max_completion_tokens": None}, 2),
    ):
        answer = script.post(CHAT, {"messages": message(), "temperature": 0, **fields}).json()
        assert answer["usage"]["completion_tokens"] == tokens
    # The default of /v1/completions is its own.
    answer = script.post(COMPLETIONS, {"prompt": LONG, "temperature": 0}).json()
    assert answer["choices"][0]["text"] == digits(16)


def test_oai_09_the_last_chunk(script: Client) -> None:
    stream = script.stream(CHAT, {"messages": message(), "temperature": 0})
    assert "".join(stream.deltas()) == CHAT_ANSWER
    *chunks, last = stream.chunks
    assert stream.done
    assert last["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert not any("im_end" in str(chunk["choices"]) for chunk in stream.chunks)


@pytest.mark.parametrize(
    ("path", "asked"),
    [(COMPLETIONS, {"prompt": LONG}), (CHAT, {"messages": message(), "input_ids": byte_ids(LONG)})],
    ids=IDS,
)
def test_oai_09_an_aborted_stream(script: Client, path: str, asked: dict[str, Any]) -> None:
    body = {**asked, "rid": "oai-09", "temperature": 0, "max_tokens": 4000}
    stream = script.stream(path, body).wait_chunks(3)
    assert script.abort(rid="oai-09").status_code == 200
    text = "".join(stream.deltas())
    assert digits(4000).startswith(text)
    assert stream.done
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in stream.chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["abort"]
    assert script.post(NATIVE, {"text": "s", "rid": "oai-09"}).status_code == 200
