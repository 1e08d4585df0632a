"""The OpenAPI document says what the server does, refusals included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ouro_sgl.frontend.openapi import AnswerDoc, ErrorDoc, SchemaErrorDoc
from tests.frontend_server import VOCAB_SIZE, running_frontend, write_echo_checkpoint
from tests.mock_scheduler import MockScheduler

NATIVE, OPENAI = ("/generate",), ("/v1/completions", "/v1/chat/completions")
KEY = {"authorization": "Bearer secret"}
METHODS = {"GET", "POST", "PUT", "DELETE", "PATCH"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client without a key of a server that wants one."""
    folder: Path = write_echo_checkpoint(tmp_path_factory.mktemp("echo"))
    with running_frontend(folder, api_key="secret", max_body_bytes=2000) as frontend:
        scheduler = MockScheduler(frontend.ipc_dir, VOCAB_SIZE)
        scheduler.start()
        try:
            frontend.wait_healthy()
            with frontend.client() as http:
                yield http
        finally:
            scheduler.stop()


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = client.get("/openapi.json", headers=KEY).json()
    return document


def schema_of(document: dict[str, Any], response: dict[str, Any]) -> str:
    return json.dumps(response["content"]["application/json"]["schema"])


def test_refusals_are_documented(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert "422" not in responses
            assert "503" in responses or path == "/metrics"
            assert ("401" in responses) == (not path.startswith("/health"))
            assert ("413" in responses) == (method != "get" or "requestBody" in operation)
            if "requestBody" in operation:
                assert "Error" in schema_of(document, responses["400"])
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys()
    assert "HTTPValidationError" not in text


def test_refusals_are_as_documented(client: httpx.Client, document: dict[str, Any]) -> None:
    for path in (path for path in document["paths"] if "{" not in path):
        for method in document["paths"][path]:
            refused = client.request(method, path)
            if path.startswith("/health"):
                assert (refused.status_code, refused.content) == (200, b"")
                continue
            assert refused.status_code == 401
            ErrorDoc.model_validate(refused.json())
            if "413" in document["paths"][path][method]["responses"]:
                long = client.request(method, path, content=b"x" * 2001, headers=KEY)
                assert long.status_code == 413
                ErrorDoc.model_validate(long.json())
            if "requestBody" in document["paths"][path][method] and path not in OPENAI:
                unreadable = client.request(method, path, content=b"{", headers=KEY)
                assert unreadable.status_code == 400
                SchemaErrorDoc.model_validate(unreadable.json())
    missing = client.get("/v1/models/nobody", headers=KEY)
    assert missing.status_code == 404
    ErrorDoc.model_validate(missing.json())


def test_other_methods_name_the_ones_there_are(client: httpx.Client, document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        known = {method.upper() for method in operations}
        for method in METHODS - known:
            answer = client.request(method, path.replace("{model}", "echo"), headers=KEY)
            assert answer.status_code == 405
            assert set(answer.headers["allow"].split(", ")) == known, (method, path)


def assert_described(value: dict[str, Any], model: Any) -> None:
    """Every field of ``value`` stands in ``model``, with such a type."""
    model.model_validate(value)
    assert value.keys() <= model.model_fields.keys()


def test_answers_have_the_documented_fields(client: httpx.Client) -> None:
    body = {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 100, "n": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 6],
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
    }
    answers = client.post("/generate", json=body, headers=KEY).json()
    stream = client.post("/generate", json={**body, "stream": True}, headers=KEY).text
    *events, done = [event for event in stream.split("\n\n") if event]
    assert done == "data: [DONE]"
    answers += [json.loads(event.removeprefix("data: ")) for event in events]
    assert len(answers) > 4
    for answer in answers:
        assert_described(answer, AnswerDoc)
        assert_described(answer["meta_info"], AnswerDoc.model_fields["meta_info"].annotation)


def test_an_event_is_one_line_to_every_reader(client: httpx.Client) -> None:
    text = "a\x85b\u2028c\u2029d\n"
    body = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": len(text.encode())}}
    with client.stream("POST", "/generate", json=body, headers=KEY) as response:
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["text"] == text
    assert lines[-1] == "data: [DONE]"
