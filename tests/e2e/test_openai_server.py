"""The ``openai`` client against whole servers: a script model, whose every answer is known, and ouro-tiny."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest

from ouro_sgl.frontend.openai.tool_calls import ListedCalls, calls_schema
from tests.models import byte_ids, chain_of, script_checkpoint
from tests.server import Server, running_server

# The template of the script model ends with a line feed, from which the answer goes on.
ANSWER = "Ok: €😀"
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    chain = chain_of([*byte_ids("\n" + ANSWER), 2, *byte_ids("xyz"), 0])
    hazards = dict.fromkeys(byte_ids("Ok"), 0.9)
    folder: Path = script_checkpoint(tmp_path_factory.mktemp("script"), chain, hazards=hazards)
    with running_server(folder, "--served-model-name", "script") as server:
        yield server


@pytest.fixture(scope="module")
def client(script: Server) -> Iterator[openai.OpenAI]:
    with client_of(script) as client:
        yield client


def test_a_chat_ends_with_its_turn(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(model="script", messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.matched_stop) == (ANSWER, "stop", 2)
    assert answer.usage.completion_tokens == len(byte_ids(ANSWER)) + 1
    early: Any = client.chat.completions.create(
        model="script", messages=MESSAGES, temperature=0, extra_body={"exit_threshold": 0.6}
    )
    # lambda is 0.9 after "O" and "k", else 0.5; output i was predicted by the token before it.
    assert early.choices[0].exit_depths[:4] == [4, 1, 1, 2]
    assert early.choices[0].message.content == ANSWER


def test_a_stream_joins_to_the_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="script",
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"exit_threshold": 0.6},
    )
    *chunks, usage = stream
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == ANSWER
    assert not any("\ufffd" in piece or "<|" in piece for piece in pieces)
    last: Any = chunks[-1]
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].exit_depths[:4] == [4, 1, 1, 2]
    assert last.mean_exit_depth == pytest.approx(last.choices[0].mean_exit_depth)
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(last.choices[0].exit_depths)


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"stop": None}, {"stop": None}),
    ({"max_tokens": 3}, {"max_new_tokens": 3}),
    ({"max_tokens": 12, "ignore_eos": True}, {"max_new_tokens": 12, "ignore_eos": True}),
    (
        {"max_tokens": 12, "ignore_eos": True, "skip_special_tokens": False},
        {"max_new_tokens": 12, "ignore_eos": True, "skip_special_tokens": False},
    ),
    ({"stop_token_ids": byte_ids(":")}, {"stop_token_ids": byte_ids(":")}),
    ({"stop": "k:"}, {"stop": "k:"}),
    ({"stop": ["k:"], "no_stop_trim": True}, {"stop": ["k:"], "no_stop_trim": True}),
    ({"temperature": 1, "top_k": 1}, {"temperature": 1, "top_k": 1}),
    ({"min_tokens": 14, "max_tokens": 15}, {"min_new_tokens": 14, "max_new_tokens": 15}),
    (
        {"seed": 5, "temperature": 50, "max_tokens": 9},
        {"sampling_seed": 5, "temperature": 50, "max_new_tokens": 9},
    ),
    ({"logit_bias": {"0": 100}}, {"logit_bias": {"0": 100}}),
    ({"regex": "O[a-z]+"}, {"regex": "O[a-z]+"}),
    ({"ebnf": 'root ::= "Ok"'}, {"ebnf": 'root ::= "Ok"'}),
]


@pytest.mark.parametrize(("fields", "native"), FIELDS, ids=str)
def test_a_field_does_the_same_on_every_route(
    script: Server, fields: dict[str, Any], native: dict[str, Any]
) -> None:
    params = {"temperature": 0, "max_new_tokens": 40, **native}
    expected = script.post("/generate", {"text": CHAT, "sampling_params": params})
    shared = {"temperature": 0, "max_tokens": 40, **fields}
    chat = script.post("/v1/chat/completions", {"messages": MESSAGES, **shared})
    completion = script.post("/v1/completions", {"prompt": CHAT, **shared})
    assert chat.status == completion.status == expected.status, (chat.body, expected.body)
    if expected.status != 200:
        assert chat.json()["message"] == completion.json()["message"] == expected.json()["error"]["message"]
        return
    meta = expected.json()["meta_info"]
    for answer in (chat.json(), completion.json()):
        (choice,) = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text == expected.json()["text"]
        assert choice["finish_reason"] == meta["finish_reason"]["type"]
        assert choice["matched_stop"] == meta["finish_reason"].get("matched")
        assert choice["exit_depths"] == meta["exit_depths"]


OK = {"enum": ["Ok"]}


def test_a_response_format_is_a_schema(script: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "ok", "schema": OK}}
    for field, schema in (
        ({"response_format": form}, OK),
        ({"json_schema": json.dumps(OK)}, OK),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ):
        params = {"temperature": 0, "max_new_tokens": 20, "json_schema": json.dumps(schema)}
        expected = script.post("/generate", {"text": CHAT, "sampling_params": params})
        shared = {"temperature": 0, "max_tokens": 20, **field}
        chat = script.post("/v1/chat/completions", {"messages": MESSAGES, **shared})
        completion = script.post("/v1/completions", {"prompt": CHAT, **shared})
        assert chat.status == completion.status == expected.status
        if expected.status == 200:
            text = expected.json()["text"]
            assert chat.json()["choices"][0]["message"]["content"] == text
            assert completion.json()["choices"][0]["text"] == text


def test_a_demanded_call_is_a_schema(script: Server) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    function = {"name": "ok", "parameters": parameters}
    schema = json.dumps(calls_schema([function], single=True))
    params = {"temperature": 0, "max_new_tokens": 60, "json_schema": schema}
    expected = script.post("/generate", {"text": CHAT, "sampling_params": params})
    asked = {
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": function}],
        "parallel_tool_calls": False,
    }
    for choice in ("required", {"type": "function", "function": {"name": "ok"}}):
        answer = script.post("/v1/chat/completions", {**asked, "tool_choice": choice})
        assert answer.status == expected.status
        if expected.status == 200:
            parser = ListedCalls(["ok"])
            parser.feed(expected.json()["text"])
            content, calls = parser.finish()
            message = answer.json()["choices"][0]["message"]
            functions = [call["function"] for call in message.get("tool_calls", [])]
            assert (message["content"], functions) == (content, [asdict(call) for call in calls])


def test_samples_differ_and_repeat(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model="script", prompt="\n", temperature=50, seed=3, n=3, max_tokens=8
        )
        return [choice.text for choice in answer.choices]

    assert texts() == texts()
    assert len(set(texts())) == 3


def test_scoring_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="script", prompt="\nOk:", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    logprobs: Any = answer.choices[0].logprobs
    assert answer.choices[0].text == "\nOk: "
    assert logprobs.tokens == ["\n", "O", "k", ":", " "]
    assert logprobs.token_logprobs[0] is None
    assert all(-0.01 < value <= 0 for value in logprobs.token_logprobs[1:])
    assert [list(best) for best in logprobs.top_logprobs[1:]] == [["O"], ["k"], [":"], [" "]]


def test_ouro_tiny() -> None:
    question: Any = [{"role": "user", "content": "What is 3 plus 4?"}]
    with running_server(None) as server, client_of(server) as client:
        (model,) = client.models.list().data
        early = {"exit_threshold": 0.5}
        answer: Any = client.chat.completions.create(
            model=model.id, messages=question, temperature=0, extra_body=early
        )
        (choice,) = answer.choices
        assert "7" in choice.message.content
        assert choice.finish_reason == "stop"
        assert choice.exit_depths[0] == 4
        assert min(choice.exit_depths) < 4
        stream = client.chat.completions.create(
            model=model.id, messages=question, temperature=0, extra_body=early, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content
        started: Any = [*question, {"role": "assistant", "content": choice.message.content[:4]}]
        rest = client.chat.completions.create(
            model=model.id,
            messages=started,
            temperature=0,
            extra_body={**early, "continue_final_message": True},
        )
        assert choice.message.content[:4] + (rest.choices[0].message.content or "") == choice.message.content
