"""One call of an OpenAI route: the native request behind it, and what its answers have in common."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Any

import orjson

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.openai.protocol import (
    DEFAULT_MODEL,
    JsonObjectFormat,
    JsonSchemaFormat,
    SharedFields,
)
from ouro_sgl.frontend.schema import GenerateBody

# What both APIs call by the same name.
SAME_NAMES = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "regex",
    "ebnf",
    "json_schema",
    "exit_mode",
    "min_loops",
    "max_loops",
    "exit_threshold",
    "exit_trace",
    "trace_id",
)
CONSTRAINTS = ("json_schema", "regex", "ebnf")


def sampling_params(request: SharedFields, max_new_tokens: int | None) -> dict[str, Any]:
    """The native ``sampling_params`` of a request; what was not given is left out.

    Args:
        max_new_tokens: None: to the end of the context.

    Raises:
        RequestError: ``response_format`` and ``json_schema`` are both given, or the schema is nested too
            deeply.
    """
    params = {name: value for name in SAME_NAMES if (value := getattr(request, name)) is not None}
    params["max_new_tokens"] = max_new_tokens
    if request.min_tokens is not None:
        params["min_new_tokens"] = request.min_tokens
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    schema: dict[str, Any] | None = None
    if isinstance(request.response_format, JsonSchemaFormat):
        schema = request.response_format.json_schema.json_schema
    elif isinstance(request.response_format, JsonObjectFormat):
        schema = {"type": "object"}
    if schema is not None:
        add_schema(params, schema, "response_format")
    return params


def add_schema(params: dict[str, Any], schema: dict[str, Any], reason: str) -> None:
    """Constrain the output to ``schema``, on behalf of the field ``reason``.

    Raises:
        RequestError: the output is constrained already, or the schema is nested too deeply.
    """
    for name in CONSTRAINTS:
        if params.get(name):
            raise RequestError(f"{reason} and {name} both constrain the output: give one of them")
    try:
        params["json_schema"] = orjson.dumps(schema).decode()
    except orjson.JSONEncodeError:
        raise RequestError(f"{reason}: the schema is nested too deeply") from None


def extra_key(request: SharedFields) -> str | list[str] | None:
    """The cache namespace of ``extra_key`` and ``cache_salt``."""
    key, salt = request.extra_key, request.cache_salt
    if not salt:
        return key
    # The length tells salt and key apart: two different pairs never share a namespace.
    if isinstance(key, list):
        return [f"{len(salt)}:{salt}{one}" for one in key]
    return f"{len(salt)}:{salt}{key or ''}"


class Job(ABC):
    """Makes one route's answers out of native ones.

    A stream calls :meth:`chunks` for every native snapshot, then :meth:`last_chunks`; any other call
    :meth:`answer`, once. Snapshots of a sequence are cumulative, chunks carry what is new.
    """

    object_name: str
    chunk_name: str
    keep_markers = False  # see Tokenizer.detokenizer

    def __init__(self, request: SharedFields, id_prefix: str, created: int) -> None:
        options = request.stream_options
        rid = request.rid or id_prefix + secrets.token_hex(16)
        self.rid = rid
        self.stream = bool(request.stream)
        self.samples = request.n or 1
        self._id = rid if isinstance(rid, str) else rid[0]
        self._model = request.model or DEFAULT_MODEL
        self._created = created
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._counts: dict[int, tuple[int, int, int]] = {}  # by index: prompt, cached, completion tokens
        self._depths: dict[int, tuple[int, int]] = {}  # by index, at its end: tokens, loops

    @property
    @abstractmethod
    def body(self) -> GenerateBody:
        """The native request."""

    @abstractmethod
    def _choice(self, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        """The choice of a complete sequence."""

    @abstractmethod
    def _deltas(self, index: int, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Choices that carry what ``answer`` adds; with a finish reason, the last one shows it."""

    def answer(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        choices = []
        for index, answer in enumerate(answers):
            self._note(index, answer["meta_info"])
            choices.append(self._choice(index, answer))
        return {
            "id": self._id,
            "object": self.object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": self._usage(),
            "metadata": {"weight_version": answers[0]["meta_info"]["weight_version"]},
            "mean_exit_depth": self._mean_exit_depth(),
        }

    def chunks(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Chunks for what a snapshot adds; perhaps none."""
        index = answer.get("index", 0)
        meta = answer["meta_info"]
        self._note(index, meta)
        return [self._chunk([choice]) for choice in self._deltas(index, answer)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Chunks behind those of all sequences."""
        return [self._chunk([], self._usage())] if self._include_usage else []

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._continuous_usage:
            usage = self._usage()
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": self.chunk_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }
        if not choices or choices[0]["finish_reason"] is not None:
            chunk["mean_exit_depth"] = self._mean_exit_depth()
        return chunk

    def _note(self, index: int, meta: dict[str, Any]) -> None:
        self._counts[index] = (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"])
        if meta["finish_reason"] is not None:
            depths = meta["exit_depths"]
            self._depths[index] = (len(depths), sum(depths))

    def _usage(self) -> dict[str, Any]:
        firsts = [counts for index, counts in self._counts.items() if index % self.samples == 0]
        prompt = sum(counts[0] for counts in firsts)
        completion = sum(counts[2] for counts in self._counts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(counts[1] for counts in firsts)},
        }

    def _mean_exit_depth(self) -> float | None:
        tokens = sum(count for count, _ in self._depths.values())
        return sum(loops for _, loops in self._depths.values()) / tokens if tokens else None


def end_fields(meta: dict[str, Any]) -> dict[str, Any]:
    """What the end of a sequence adds to its choice."""
    reason = meta["finish_reason"]
    return {
        "finish_reason": reason["type"],
        "matched_stop": reason.get("matched"),
        "exit_depths": meta["exit_depths"],
        "mean_exit_depth": meta["mean_exit_depth"],
    }
