"""Bodies of ``/generate``: what is read, what is refused, how a batch expands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.openapi import GenerateDoc, SamplingParamsDoc
from ouro_sgl.frontend.sampling import CHECKS
from ouro_sgl.frontend.schema import Expanded, GenerateBody, SchemaError, convert_body, decode_body, expand
from tests.unit.frontend.test_sampling import LIMITS

NOT_JSON = [
    b"",
    b"{",
    b'{"text":"a",}',
    b"null",
    b"[]",
    b'"x"',
    b'{"text":"a"} x',
    b'{"text":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"other":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"text":"\xff"}',
    b'{"other":"\xff"}',
    b'{"text":"\\ud800"}',
    '{"text":"a"}'.encode("utf-16"),
    b'\xef\xbb\xbf{"text":"a"}',
    b'{"text":"a","sampling_params":{"temperature":NaN}}',
    b'{"text":"a","sampling_params":{"temperature":Infinity}}',
    b'{"text":"a","sampling_params":{"temperature":1e999}}',
]


@pytest.mark.parametrize("data", NOT_JSON, ids=range(len(NOT_JSON)))
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(SchemaError) as refusal:
        decode_body(data)
    assert refusal.value.status == 400


WRONG_TYPES = {
    "text": [5, [1], ["a", None], {}, True],
    "input_ids": ["1", [1.5], [True], ["5"], [None], [[[1]]], 5, [[1.5]], {}],
    "sampling_params": [5, "x", [1], [None]],
    "rid": [5, [1], {}],
    "stream": ["yes", 1],
    "return_logprob": ["yes", [1], 1],
    "logprob_start_len": [1.5, "0", [None]],
    "top_logprobs_num": [1.5, True, "1"],
    "token_ids_logprob": [5, [1.5], [[1.5]], ["1"]],
    "return_text_in_logprobs": [1],
    "extra_key": [5, [5]],
    "priority": ["high", 1.5, True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_TYPES.items() for value in values]
)
def test_wrong_types_are_refused_with_their_place(name: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=name):
        convert_body({"text": "a", name: value})


@pytest.mark.parametrize(
    "payload",
    [
        {"text": "\ud800"},
        {"text": ["a", "b\udfff"]},
        {"text": "a", "extra_key": "\ud800"},
        {"text": "a", "sampling_params": {"stop": ["\ud800"]}},
        {"text": "a", "sampling_params": {"json_schema": {"const": "\ud800"}}},
    ],
)
def test_half_a_character_is_refused(payload: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="half a character"):
        convert_body(payload)


@pytest.mark.parametrize("text", ["\x00", "\uffff", "e" + "\u0301" * 1000, "\u202eabc"])
def test_odd_characters_are_kept(text: str) -> None:
    import orjson

    assert decode_body(orjson.dumps({"text": text, "unknown": 1})).text == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exit_mode", "ouro"),
        ("min_loops", 1),
        ("max_loops", 2),
        ("exit_threshold", 0.0),
        ("exit_trace", []),
        ("trace_id", "a"),
    ],
)
def test_a_key_of_the_loop_beside_sampling_params_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=f"^{name} belongs into sampling_params"):
        decode_body(msgspec.json.encode({"text": "a", name: value}))
    assert decode_body(msgspec.json.encode({"text": "a", name: None})).text == "a"


def test_null_and_absent_are_the_same() -> None:
    nothing = dict.fromkeys(GenerateBody.__struct_fields__)
    assert convert_body(nothing) == GenerateBody()


def expand_payload(max_sequences: int | None = None, **payload: Any) -> Expanded:
    return expand(convert_body(payload), LIMITS, max_sequences)


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({}, "text or input_ids"),
    ({"text": []}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [100]}, "token id 100 is outside"),
    ({"input_ids": [-1]}, "token id -1 is outside"),
    ({"input_ids": [2**31]}, "token id 2147483648"),
    ({"input_ids": [2**70]}, "very large integer"),
    ({"input_ids": [[1], 2]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [[1], [100]]}, "token id 100"),
    ({"text": "a", "sampling_params": [{}]}, "single prompt"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n must be the same"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0}]}, "top_p"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "a", "top_logprobs_num": 101}, "top_logprobs_num"),
    ({"text": "a", "token_ids_logprob": [100]}, "token_ids_logprob"),
    ({"text": "a", "token_ids_logprob": [-1]}, "token_ids_logprob"),
    ({"text": "a", "token_ids_logprob": [[1]]}, "token_ids_logprob"),
    ({"text": ["a", "b"], "token_ids_logprob": [[1], [2], [3]]}, "token_ids_logprob"),
    ({"text": ["a", "b"], "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
    ({"text": "a", "rid": ["x"]}, "rid must be a string"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid holds 1"),
    ({"text": ["a", "b"], "rid": []}, "rid holds 0"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "twice"),
    ({"text": "a", "priority": 2**63}, "priority"),
    ({"text": ["a"] * 9}, "at most 8 sequences"),
    ({"text": "a", "sampling_params": {"n": 10**12}}, "at most 8 sequences"),
]


@pytest.mark.parametrize(("payload", "reason"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_bad_values_are_refused(payload: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refusal:
        expand_payload(8, **payload)
    assert not isinstance(refusal.value, SchemaError)


def test_text_wins_over_ids() -> None:
    (prompt,) = expand_payload(text="a", input_ids=[1]).prompts
    assert (prompt.text, prompt.ids) == ("a", [])


@pytest.mark.parametrize(
    ("payload", "many", "rids"),
    [
        ({"text": "a", "rid": "x"}, False, ["x"]),
        ({"text": ["a"], "rid": "x"}, True, ["x_0"]),
        ({"text": ["a", "b"], "rid": "x"}, True, ["x_0", "x_1"]),
        ({"text": ["a", "b"], "rid": ["y", "z"]}, True, ["y", "z"]),
        ({"input_ids": [[1], [2]], "rid": ["y", "z"]}, True, ["y", "z"]),
        ({"text": "a", "rid": "x", "sampling_params": {"n": 2}}, True, ["x_0", "x_1"]),
        (
            {"text": ["a", "b"], "rid": ["y", "z"], "sampling_params": {"n": 2}},
            True,
            ["y_0", "y_1", "z_0", "z_1"],
        ),
        ({"text": "a"}, False, None),
    ],
)
def test_shapes_and_request_ids(payload: dict[str, Any], many: bool, rids: list[str] | None) -> None:
    expanded = expand_payload(**payload)
    assert (expanded.many, expanded.rids) == (many, rids)


def test_a_group_is_named_by_the_given_id() -> None:
    assert expand_payload(text=["a", "b"], rid="x").groups == {"x": range(2)}
    groups = expand_payload(text=["a", "b"], rid=["y", "z"], sampling_params={"n": 3}).groups
    assert groups == {"y": range(3), "z": range(3, 6)}


def test_where_prompt_logprobs_start() -> None:
    def start(**payload: Any) -> int | None:
        return expand_payload(**payload).prompts[0].logprob_start

    nothing = {"max_new_tokens": 0}
    assert start(text="a", return_logprob=True) is None
    assert start(text="a", return_logprob=True, logprob_start_len=-1) is None
    assert start(text="a", return_logprob=True, logprob_start_len=0) == 0
    assert start(text="a", return_logprob=False, logprob_start_len=0) is None
    # The shape that asks for unconditional likelihoods gets the prompt's values without a start.
    assert start(input_ids=[[1, 2]], return_logprob=True, sampling_params=nothing) == 0
    assert (
        start(input_ids=[[1, 2]], return_logprob=True, logprob_start_len=-1, sampling_params=nothing) is None
    )
    assert start(input_ids=[1, 2], return_logprob=True, sampling_params=nothing) is None
    assert start(input_ids=[[1, 2]], return_logprob=True) is None


def test_fields_may_differ_by_prompt() -> None:
    first, second = expand_payload(
        text=["a", "b"],
        return_logprob=[True, False],
        top_logprobs_num=[3, 5],
        token_ids_logprob=[[1], None],
        extra_key=["x", ""],
        sampling_params=[{"stop": "a"}, {"stop": "b"}],
    ).prompts
    assert (first.logprobs, first.top_logprobs_num, first.token_ids_logprob, first.extra_key) == (
        True,
        3,
        [1],
        "x",
    )
    assert (second.logprobs, second.top_logprobs_num, second.extra_key) == (False, 0, None)
    assert (first.sampling.stops, second.sampling.stops) == (["a"], ["b"])


def test_the_documentation_has_the_fields_of_the_route() -> None:
    assert set(SamplingParamsDoc.model_fields) == set(CHECKS)
    assert set(GenerateDoc.model_fields) == set(GenerateBody.__struct_fields__)
