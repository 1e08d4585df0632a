"""What ``/docs`` says about ``/generate``, and about errors of all routes.

The route itself never sees pydantic (it decodes its body with ``schema.GenerateBody``); these models
only describe it. A test compares their fields with what the route accepts.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

REFS = "#/components/schemas/{model}"

# Descriptions of statuses that many routes share.
NO_KEY = "A valid API key is needed"
TOO_LONG = "The request body is too long"
NOT_READY = "The server is starting, stopping or broken"


class SamplingParamsDoc(BaseModel):
    """How to sample, stop and leave the loop. Null means the default; unknown keys are refused."""

    max_new_tokens: int | None = Field(128, ge=0, description="null: to the end of the context")
    min_new_tokens: int = Field(0, ge=0)
    stop: str | list[str] | None = Field(None, description="at most 32 strings; the first in the list wins")
    stop_regex: str | list[str] | None = Field(
        None,
        description="RE2 patterns, at most 32 of 256 bytes; matches of more than 4096 bytes may be missed; "
        "a request whose patterns take too much time is ended with 400; streams may show part of a match",
    )
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = Field(False, description="go on after end ids and stop_token_ids")
    no_stop_trim: bool = Field(False, description="keep the matched stop in the text")
    temperature: float = Field(1.0, ge=0.0, description="below 1e-6: greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, description="-1: off")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=2.0)
    logit_bias: dict[str, float] | None = Field(None, description="added to the logits, by token id")
    json_schema: str | dict[str, Any] | None = Field(None, description="the output is such a JSON value")
    regex: str | None = Field(None, description="the whole output matches it")
    ebnf: str | None = Field(None, description="the output is a sentence of this grammar (GBNF), from root")
    sampling_seed: int | None = Field(None, description="64 bit; the same seed gives the same tokens")
    n: int = Field(1, ge=1, description="samples of each prompt")
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = Field(True, description="accepted; changes nothing here")
    stream_interval: int = Field(1, ge=1, description="tokens between two chunks of a stream")
    exit_mode: str | None = Field(
        None, description="ouro, ouro_delayed, random_lookahead, lookahead or trace; null: the server's"
    )
    min_loops: int | None = Field(None, ge=1, description="loops that every generated token runs at least")
    max_loops: int | None = Field(None, ge=1, description="loops after which every token leaves")
    exit_threshold: float | None = Field(
        None, ge=0.0, le=1.0, description="leave when the exit probability reached this; 1: never early"
    )
    exit_trace: list[int] | None = Field(
        None, description="exit depth of each output token; the first is full"
    )
    trace_id: str | None = Field(None, description="an entry of the server's exit trace file")


class GenerateDoc(BaseModel):
    """One prompt or a batch; fields that may be lists then hold one entry for each prompt."""

    text: str | list[str] | None = Field(None, examples=["Once upon a time"])
    input_ids: list[int] | list[list[int]] | None = Field(None, description="instead of text")
    sampling_params: SamplingParamsDoc | list[SamplingParamsDoc] | None = None
    stream: bool = Field(False, description="server-sent events, each with the whole answer so far")
    rid: str | list[str] | None = Field(
        None, description="id for /abort_request, unique while it runs; at most 1024 characters"
    )
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] | None = Field(
        None, description="first prompt position to score; -1: output only"
    )
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_exit_logprobs: bool = Field(
        False, description="the exit gate's value after each loop of each output token"
    )
    extra_key: str | list[str] | None = Field(
        None, description="namespace of the prefix cache; at most 1024 characters"
    )
    priority: int = Field(0, description="higher goes first")


# Log-probability (null: there is none at position 0), token id, text (null unless asked for).
LogprobDoc = tuple[float | None, int, str | None]


class MetaInfoDoc(BaseModel):
    id: str
    finish_reason: dict[str, Any] | None = Field(description="type stop, length or abort; null while running")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="prompt tokens found in the prefix cache")
    num_retractions: int
    e2e_latency: float = Field(description="seconds")
    weight_version: str
    weight_versions: list[str] | None = Field(
        None, description="only if the weights changed while the request ran; then nothing is reproducible"
    )
    exit_depths: list[int] = Field(description="loops run for each output token")
    mean_exit_depth: float | None
    exit_logprobs: list[list[float]] | None = Field(
        None, description="with return_exit_logprobs: lambda of each loop run, in [0, 1], by output token"
    )
    input_token_logprobs: list[LogprobDoc] | None = Field(
        None, description="with return_logprob: of the prompt, from logprob_start_len on"
    )
    output_token_logprobs: list[LogprobDoc] | None = None
    output_token_logprobs_length: int | None = None
    input_top_logprobs: list[list[LogprobDoc] | None] | None = Field(
        None, description="with top_logprobs_num: the likeliest tokens of each position"
    )
    output_top_logprobs: list[list[LogprobDoc] | None] | None = None
    input_token_ids_logprobs: list[list[LogprobDoc] | None] | None = Field(
        None, description="with token_ids_logprob: these tokens, at each position"
    )
    output_token_ids_logprobs: list[list[LogprobDoc] | None] | None = None


class AnswerDoc(BaseModel):
    """Answer of one sequence; a batch or n > 1 gets a list of them."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfoDoc
    prompt_token_ids: list[int] | None = Field(None, description="with return_prompt_token_ids")
    index: int | None = Field(None, description="in a stream of several sequences: which one this is")


class ErrorMessageDoc(BaseModel):
    message: str


class ErrorDoc(BaseModel):
    """A request that was understood and refused."""

    error: ErrorMessageDoc


class SchemaErrorDoc(BaseModel):
    """A request that could not be understood: not JSON, or a field of the wrong type."""

    object: Literal["error"]
    message: str
    type: str
    param: None
    code: int


def event_stream(payload: dict[str, Any]) -> dict[str, Any]:
    """Schema of one server-sent event of a stream; its data is JSON of the schema ``payload``."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]", "description": "the last event"}, data]}},
        "required": ["data"],
    }


def describe_generate() -> tuple[dict[str, Any], dict[str, Any]]:
    """(path item of ``/generate``, component schemas that it and errors refer to)."""
    references, definitions = models_json_schema(
        [
            (GenerateDoc, "validation"),
            *((model, "serialization") for model in (AnswerDoc, ErrorDoc, SchemaErrorDoc)),
        ],
        ref_template=REFS,
    )
    answer, error, schema_error = (
        references[(model, "serialization")] for model in (AnswerDoc, ErrorDoc, SchemaErrorDoc)
    )
    refusal = {"content": {"application/json": {"schema": error}}}
    either = {"content": {"application/json": {"schema": {"anyOf": [error, schema_error]}}}}
    answers = {"anyOf": [answer, {"type": "array", "items": answer}]}
    operation = {
        "summary": "Generate text",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": references[(GenerateDoc, "validation")]}},
        },
        "responses": {
            "200": {
                "description": (
                    "The answer, a list of answers for a batch or n > 1, or a stream that ends with "
                    "`data: [DONE]`: each event holds a whole answer so far, or says what was refused"
                ),
                "content": {
                    "application/json": {"schema": answers},
                    "text/event-stream": {"schema": event_stream({"anyOf": [answer, error]})},
                },
            },
            "400": {"description": "The request is refused; the message says why", **either},
            "401": {"description": NO_KEY, **refusal},
            "413": {"description": TOO_LONG, **refusal},
            "503": {"description": NOT_READY, **refusal},
        },
    }
    path = {
        "post": {**operation, "operationId": "generate"},
        "put": {**operation, "operationId": "generate_put"},
    }
    return path, definitions.get("$defs", {})
