"""What the models of the OpenAI routes accept, and that judging it is cheap."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ouro_sgl.frontend.openai.job import SAME_NAMES
from ouro_sgl.frontend.openai.protocol import ChatRequest, CompletionRequest, SharedFields
from ouro_sgl.frontend.routes import DetokenizeBody, TokenizeBody
from ouro_sgl.frontend.sampling import CHECKS

USER = {"role": "user", "content": "a"}
MANY = 500


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1, "a"] * MANY}),
        (CompletionRequest, {"prompt": [["a"]] * MANY}),
        (CompletionRequest, {"prompt": [["a"] * MANY]}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "exit_trace": ["x"] * MANY}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}),
        (ChatRequest, {"messages": [USER], "tools": [{}] * MANY}),
        (TokenizeBody, {"prompt": [1] * MANY}),
        (DetokenizeBody, {"tokens": [["a"]] * MANY}),
    ],
    ids=range(11),
)
def test_a_long_list_of_wrong_values_is_one_error(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body)
    assert refusal.value.error_count() <= 8


def test_null_and_unknown_fields_mean_nothing() -> None:
    nothing = dict.fromkeys(SharedFields.model_fields)
    assert ChatRequest.model_validate(
        {"messages": [USER], **nothing, "odd": 5}
    ) == ChatRequest.model_validate({"messages": [USER]} | nothing)


def test_every_field_of_the_same_name_is_known_to_both() -> None:
    assert set(SAME_NAMES) <= SharedFields.model_fields.keys()
    not_served_yet = {"json_schema", "regex", "ebnf", "stop_regex"}
    assert set(SAME_NAMES) - not_served_yet <= CHECKS.keys()
    native = {"max_new_tokens", "min_new_tokens", "sampling_seed"}  # by other names
    unused = {"spaces_between_special_tokens", "stream_interval"}
    assert CHECKS.keys() - not_served_yet - native - unused <= set(SAME_NAMES)
