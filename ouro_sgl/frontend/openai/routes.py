"""From the body of an OpenAI route to a :class:`Job`, and what the documentation says about the routes."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.manager import TokenizerManager
from ouro_sgl.frontend.openai.chat import ChatFormat, ChatJob
from ouro_sgl.frontend.openai.completions import CompletionJob
from ouro_sgl.frontend.openai.job import Job
from ouro_sgl.frontend.openai.protocol import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionChunk,
    CompletionRequest,
    ErrorBody,
    ModelCard,
)
from ouro_sgl.frontend.openapi import NO_KEY, NOT_READY, TOO_LONG, ErrorDoc, event_stream
from ouro_sgl.frontend.schema import SchemaError

T = TypeVar("T", bound=BaseModel)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)

# Fields of OpenAI and SGLang that ask for what this server cannot do. Clients send them empty.
REFUSED = (
    "suffix",
    "functions",
    "function_call",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "watermark",
    "return_hidden_states",
    "return_routed_experts",
)
ERROR_TYPES = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def openai_error(error: RequestError) -> dict[str, Any]:
    """The body of a refusal."""
    return {
        "object": "error",
        "message": error.message,
        "type": ERROR_TYPES.get(error.status, "APIError"),
        "param": None,
        "code": error.status,
    }


class OpenAIRoutes:
    """Reads requests.

    Raises:
        ConfigError: the template that ``--chat-template`` names cannot be used.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._chat = ChatFormat(manager.args, manager.tokenizer)

    def job(self, path: str, data: bytes, created: int) -> Job:
        """The job of a request to one of :data:`PATHS`.

        Args:
            created: Unix time in seconds.

        Raises:
            RequestError: the request is refused.
        """
        vocab_size = self._manager.limits().vocab_size
        tokenizer = self._manager.tokenizer
        if path == CHAT:
            return ChatJob(_parse(data, ChatRequest), self._chat, tokenizer, created)
        return CompletionJob(_parse(data, CompletionRequest), tokenizer, vocab_size, created)


def _parse(data: bytes, kind: type[T]) -> T:
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SchemaError(f"the request body cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise SchemaError("the request body must be a JSON object")
    for name in REFUSED:
        if values.get(name):
            raise RequestError(f"{name} is not supported by this server")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # Of several readings of a field, the one that went furthest is the one that was meant.
        found = max(error.errors(include_url=False, include_context=False), key=lambda e: len(e["loc"]))
        place = ".".join(str(part) for part in found["loc"])
        raise SchemaError(f"{place}: {found['msg']}") from None


def model_card(manager: TokenizerManager) -> ModelCard:
    """The one model of this server.

    Raises:
        RequestError: the server is not ready.
    """
    return ModelCard(
        id=manager.model_name,
        created=manager.created,
        owned_by="ouro_sgl",
        root=manager.args.model_path,
        max_model_len=manager.limits().served_length,
    )


def describe_openai(ref_template: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(path items of the routes, component schemas that they refer to)."""
    routes: list[tuple[str, str, type[BaseModel], type[BaseModel], type[BaseModel]]] = [
        (COMPLETIONS, "Complete a text", CompletionRequest, Completion, CompletionChunk),
        (CHAT, "Answer in a conversation", ChatRequest, ChatCompletion, ChatChunk),
    ]
    references, definitions = models_json_schema(
        [
            *((route[2], "validation") for route in routes),
            *((model, "serialization") for route in routes for model in route[3:]),
            (ErrorBody, "serialization"),
            (ErrorDoc, "serialization"),
        ],
        ref_template=ref_template,
    )
    error = references[(ErrorBody, "serialization")]
    refused = {"content": {"application/json": {"schema": error}}}
    refused_before = {"content": {"application/json": {"schema": references[(ErrorDoc, "serialization")]}}}
    stream_error = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    paths = {}
    for path, summary, request, answer, chunk in routes:
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": references[(request, "validation")]}},
                },
                "responses": {
                    "200": {
                        "description": "The answer, or a stream of chunks that ends with `data: [DONE]`",
                        "content": {
                            "application/json": {"schema": references[(answer, "serialization")]},
                            "text/event-stream": {
                                "schema": event_stream(
                                    {"anyOf": [references[(chunk, "serialization")], stream_error]}
                                )
                            },
                        },
                    },
                    "400": {"description": "The request is refused", **refused},
                    "401": {"description": NO_KEY, **refused_before},
                    "413": {"description": TOO_LONG, **refused_before},
                    "503": {"description": NOT_READY, **refused},
                },
            }
        }
    return paths, definitions.get("$defs", {})
