"""Calls in a text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.openai.tool_calls import CallParser, ListedCalls, MarkedCalls, ToolCall, calls_schema

NAMES = ["add", "weather"]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
PARIS = '<tool_call>{"name": "weather", "parameters": {"city": "Zürich \\ud83d\\ude00"}}</tool_call>'
ADD_CALL = ToolCall("add", '{"a": 1, "b": [2]}')
PARIS_CALL = ToolCall("weather", '{"city": "Zürich 😀"}')


def parse(parser: CallParser, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


CASES = [
    ("plain", "plain", []),
    ("", "", []),
    ("a < b <tool", "a < b <tool", []),
    (" \n", " \n", []),
    (ADD, "", [ADD_CALL]),
    (f"Let me see.\n{ADD}\n{PARIS}\n", "Let me see.", [ADD_CALL, PARIS_CALL]),
    (f"{ADD}\n and \n{PARIS} then\n", "and then\n", [ADD_CALL, PARIS_CALL]),
    (ADD.removesuffix("</tool_call>"), "", [ADD_CALL]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [ToolCall("add", "{}")]),
]
KEPT = [
    '<tool_call>{"name": "add", "arguments": {"a":',
    "<tool_call>no json</tool_call>",
    "x \n<tool_call>[]</tool_call>",
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": ' + "[" * 5000 + "</tool_call>",
    "</tool_call>",
]


@pytest.mark.parametrize(("text", "content", "calls"), [*CASES, *((text, text, []) for text in KEPT)])
def test_marked_calls(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parse(MarkedCalls(NAMES), [text]) == (content, calls)
    assert parse(MarkedCalls(NAMES), list(text)) == (content, calls)


@given(
    st.lists(st.sampled_from([ADD, PARIS, "<tool_call>", "</tool_call>", "<", "x", " ", "\n"]), max_size=6),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_cutting_a_text_changes_nothing(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert parse(MarkedCalls(NAMES), pieces) == parse(MarkedCalls(NAMES), [text])


def test_content_does_not_wait_for_the_end() -> None:
    parser = MarkedCalls(NAMES)
    assert parser.feed("Hello ") == ("Hello", [])
    assert parser.feed("you <") == (" you", [])
    assert parser.feed("b") == (" <b", [])
    assert parser.feed(ADD) == ("", [ADD_CALL])


def test_listed_calls() -> None:
    text = json.dumps([{"name": "add", "parameters": {"a": 1, "b": [2]}}] * 2)
    assert parse(ListedCalls(NAMES), list(text)) == ("", [ADD_CALL, ADD_CALL])
    assert parse(ListedCalls(NAMES), [text[1:].split("}},")[0] + "}}"]) == ("", [ADD_CALL])
    assert parse(ListedCalls(NAMES), [text[:-9]]) == (text[:-9], [])


def test_the_schema_of_listed_calls() -> None:
    city = {
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/City"}},
        "$defs": {"City": {"enum": ["x"]}},
    }
    functions = [{"name": "add"}, {"name": "weather", "parameters": city}]
    schema = calls_schema(functions, single=False)
    assert schema["$defs"] == city["$defs"]
    assert [item["properties"]["name"] for item in schema["items"]["anyOf"]] == [
        {"const": "add"},
        {"const": "weather"},
    ]
    assert "maxItems" not in schema
    assert calls_schema(functions[:1], single=True)["maxItems"] == 1
    other = {"name": "b", "parameters": {"$defs": {"City": {"enum": ["y"]}}}}
    with pytest.raises(RequestError, match="City"):
        calls_schema([*functions, other], single=False)
    assert calls_schema([{"name": "odd", "parameters": {"$defs": 5}}], single=False)
