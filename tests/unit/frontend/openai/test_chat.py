"""What a chat request asks the runtime for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError, RequestError
from ouro_sgl.frontend.openai.chat import ChatFormat, ChatJob
from ouro_sgl.frontend.openai.protocol import ChatRequest
from ouro_sgl.frontend.tokenizer import Tokenizer
from tests.models import CHAT_TEMPLATE, byte_tokenizer

USER = {"role": "user", "content": "hi"}
ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def chat_format(folder: Path, template: str | None = CHAT_TEMPLATE, **settings: Any) -> ChatFormat:
    if template is not None:
        write(folder, "tokenizer_config.json", chat_template=template, eos_token="<|endoftext|>")
    return ChatFormat(ServerArgs(model_path=str(folder), **settings), Tokenizer(folder, 259))


def job(folder: Path, template: str = CHAT_TEMPLATE, **fields: Any) -> ChatJob:
    request = ChatRequest.model_validate({"messages": [USER], **fields})
    return ChatJob(request, chat_format(folder, template), Tokenizer(folder, 259), 1)


def answer(text: str, reason: str = "stop") -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": reason, "matched": 2},
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "completion_tokens": 2,
        "weight_version": "default",
        "exit_depths": [4, 2],
        "mean_exit_depth": 3.0,
    }
    return {"text": text, "output_ids": [5, 6], "meta_info": meta}


def test_the_prompt(folder: Path) -> None:
    assert job(folder).body.text == ASKED
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, USER]
    text = job(folder, messages=said).body.text
    assert text == f"<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n{ASKED}"


def test_continuing_the_final_message(folder: Path) -> None:
    said = [USER, {"role": "assistant", "content": "I thi"}]
    assert job(folder, messages=said, continue_final_message=True).body.text == f"{ASKED}I thi"
    with pytest.raises(RequestError, match="continue_final_message"):
        job(folder, continue_final_message=True)


def test_arguments_of_calls_reach_the_template_as_objects(folder: Path) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
    said = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}{{ messages[2].content }}"
    assert job(folder, template, messages=said).body.text == '{"a": null}3'
    for arguments in ("{", "[]", "5", "[" * 5000):
        call["function"]["arguments"] = arguments
        with pytest.raises(RequestError, match="JSON object"):
            job(folder, template, messages=said)
    with pytest.raises(RequestError, match="must not be null"):
        job(folder, messages=[{"role": "user", "content": None}])


def test_tools_reach_the_template_unless_none_may_be_called(folder: Path) -> None:
    template = "{{ tools | tojson }}"
    assert json.loads(job(folder, template, tools=[TOOL]).body.text or "") == [TOOL]
    for fields in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {}):
        assert job(folder, template, **fields).body.text == "null"
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "other"}}
    chosen = job(folder, template, tools=[TOOL, other], tool_choice=named).body
    assert json.loads(chosen.text or "") == [other]
    assert "json_schema" in chosen.sampling_params  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "both constrain"),
        ({"response_format": {"type": "json_object"}, "ebnf": "a"}, "both constrain"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
    ],
)
def test_contradictions_are_refused(folder: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        job(folder, **fields)


def test_variables_of_the_template(folder: Path) -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }}"
    assert job(folder, template, reasoning_effort="none").body.text == "False none"
    variables = {"enable_thinking": 5}
    text = job(folder, template, reasoning_effort="low", chat_template_kwargs=variables).body.text
    assert text == "5 low"


def test_sampling_parameters(folder: Path) -> None:
    write(folder, "generation_config.json", temperature=0.6, top_k=0, top_p=0.9, min_p="x")
    params = job(
        folder, top_p=0.5, seed=3, min_tokens=2, max_tokens=7, stop_token_ids=[9], exit_threshold=0.5, n=2
    ).body.sampling_params
    assert params == {
        "temperature": 0.6,
        "top_p": 0.5,
        "sampling_seed": 3,
        "min_new_tokens": 2,
        "max_new_tokens": 7,
        "stop_token_ids": [9, 0, 2],
        "exit_threshold": 0.5,
        "n": 2,
    }
    both = job(folder, max_tokens=7, max_completion_tokens=5).body.sampling_params
    assert both["max_new_tokens"] == 5  # type: ignore[index, call-overload]
    assert job(folder).body.sampling_params["max_new_tokens"] is None  # type: ignore[index, call-overload]


def test_formats_become_schemas(folder: Path) -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for form, expected in ((wanted, schema), ({"type": "json_object"}, {"type": "object"})):
        params: Any = job(folder, response_format=form).body.sampling_params
        assert json.loads(params["json_schema"]) == expected
    assert "json_schema" not in job(folder, response_format={"type": "text"}).body.sampling_params  # type: ignore[operator]
    for _ in range(300):
        schema = {"not": schema}
    deep = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(RequestError, match="deeply"):
        job(folder, response_format=deep)


def test_cache_namespaces_never_collide(folder: Path) -> None:
    def key(**fields: Any) -> Any:
        return job(folder, **fields).body.extra_key

    assert (key(), key(extra_key="k")) == (None, "k")
    keys = [key(cache_salt="ab"), key(cache_salt="a", extra_key="b"), key(cache_salt="ab", extra_key="b")]
    assert len({*keys, "ab"}) == 4


@pytest.mark.parametrize(
    ("template", "fields", "text", "reasoning", "content"),
    [
        (CHAT_TEMPLATE, {}, "<think>a</think>b", "a", "b"),
        (CHAT_TEMPLATE, {"separate_reasoning": False}, "<think>a</think>b", None, "<think>a</think>b"),
        (CHAT_TEMPLATE + "<think>\n", {}, "a</think>b", "a", "b"),
        (CHAT_TEMPLATE + "<think>\n", {"regex": "a.*"}, "a</think>b", None, "a</think>b"),
        (CHAT_TEMPLATE + "<think>\n\n</think>\n\n", {}, "ab", None, "ab"),
    ],
)
def test_reasoning(
    folder: Path, template: str, fields: dict[str, Any], text: str, reasoning: str | None, content: str
) -> None:
    (choice,) = job(folder, template, **fields).answer([answer(text)])["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (reasoning, content)


def test_reasoning_of_a_continued_message(folder: Path) -> None:
    for prefix, expected in (("<think>x", ("a", "b")), ("<think>x</think>y", (None, "a</think>b"))):
        said = [USER, {"role": "assistant", "content": prefix}]
        continued = job(folder, messages=said, continue_final_message=True)
        (choice,) = continued.answer([answer("a</think>b")])["choices"]
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == expected


def test_a_demanded_call(folder: Path) -> None:
    text = '[{"name": "add", "parameters": {"a": 1}}]'
    (choice,) = job(folder, tools=[TOOL], tool_choice="required").answer([answer(text)])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    cut = job(folder, tools=[TOOL], tool_choice="required").answer([answer(text[:9], "length")])
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["message"]["content"] == text[:9]


def test_a_checkpoint_without_a_template_refuses_chats_alone(folder: Path) -> None:
    chat = chat_format(folder, template=None)
    request = ChatRequest.model_validate({"messages": [USER]})
    with pytest.raises(RequestError, match=r"no chat template.*--chat-template"):
        ChatJob(request, chat, Tokenizer(folder, 259), 1)
    given = ChatRequest.model_validate({"messages": [USER], "input_ids": [5, 6]})
    assert ChatJob(given, chat, Tokenizer(folder, 259), 1).body.input_ids == [5, 6]


def test_a_template_that_the_user_names_must_be_right(folder: Path) -> None:
    file = folder / "mine.jinja"
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match="not valid"):
        chat_format(folder, chat_template=str(file))
    file.write_text("mine")
    assert chat_format(folder, chat_template=str(file)).render([USER], None, {}) == "mine"


def test_a_template_that_fails_refuses_the_messages(folder: Path) -> None:
    template = "{{ 'a' + messages[0].nothing.at_all }}{{ 1 // 0 }}"
    with pytest.raises(RequestError, match="chat template refuses"):
        job(folder, template)
    with pytest.raises(RequestError, match="chat template refuses"):
        job(folder, "{{ messages[0].content + 1 }}")
