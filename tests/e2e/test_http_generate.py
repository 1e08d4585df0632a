"""``/generate`` over HTTP: the frontend process against a mock scheduler."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ouro_sgl.messages import AbortReq, GenerateReq
from tests.frontend_server import VOCAB_SIZE, Frontend, running_frontend, write_echo_checkpoint
from tests.mock_scheduler import MockScheduler

Served = tuple[httpx.Client, MockScheduler, Frontend]
MAX_BODY = 1 << 20
LONG = {"max_new_tokens": 200}  # with slow rounds it runs until the test lets it end


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_echo_checkpoint(tmp_path_factory.mktemp("echo"))
    with running_frontend(folder, max_body_bytes=MAX_BODY) as frontend:
        scheduler = MockScheduler(frontend.ipc_dir, VOCAB_SIZE)
        scheduler.start()
        try:
            frontend.wait_healthy()
            with frontend.client() as client:
                yield client, scheduler, frontend
        finally:
            scheduler.stop()


def generate(client: httpx.Client, text: Any = "hello", **fields: Any) -> Any:
    response = client.post("/generate", json={"text": text, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[Any]:
    """Events of a complete stream; checks its frame."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = [block for block in response.text.split("\n\n") if block]
    assert last == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_an_answer(served: Served, method: str) -> None:
    body = {"text": "hi Paris", "sampling_params": {"max_new_tokens": 4}}
    response = served[0].request(method, "/generate", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["text"] == "hi Paris"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert answer["meta_info"]["exit_depths"] == [4, 1, 2, 3]


def test_a_stream(served: Served) -> None:
    client, _, _ = served
    body = {"text": "hi 😀<|im_end|>", "stream": True}
    chunks = events(client.post("/generate", json=body))
    texts = [chunk["text"] for chunk in chunks]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert not any("\ufffd" in text for text in texts)
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    plain = generate(client, body["text"])
    assert texts[-1] == plain["text"] == "hi 😀"
    assert chunks[-1]["output_ids"] == plain["output_ids"]


def test_a_stream_of_a_batch(served: Served) -> None:
    body = {"text": ["ab", "cd"], "stream": True, "sampling_params": {"max_new_tokens": 3, "n": 2}}
    last = {chunk["index"]: chunk["text"] for chunk in events(served[0].post("/generate", json=body))}
    assert last == {0: "aba", 1: "aba", 2: "cdc", 3: "cdc"}


def test_shapes(served: Served) -> None:
    client, _, _ = served
    two = {"max_new_tokens": 2}
    assert isinstance(generate(client, "a", sampling_params=two), dict)
    assert [a["text"] for a in generate(client, ["a"], sampling_params=two)] == ["aa"]
    several = generate(client, "ab", sampling_params={**two, "n": 3})
    assert [a["text"] for a in several] == ["ab"] * 3
    assert len({a["meta_info"]["id"] for a in several}) == 3
    response = client.post("/generate", json={"input_ids": [[100], [101]], "sampling_params": two})
    assert [a["output_ids"] for a in response.json()] == [[100, 100], [101, 101]]


def test_stop_strings(served: Served) -> None:
    client, _, _ = served
    stop = {"max_new_tokens": 50, "stop": "DEF"}
    assert generate(client, "abcDEFx", sampling_params=stop)["text"] == "abc"
    body = {"text": "abcDEFx", "stream": True, "sampling_params": stop}
    chunks = events(client.post("/generate", json=body))
    assert not any("D" in chunk["text"] for chunk in chunks)
    assert chunks[-1]["text"] == "abc"
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "DEF"}


BAD_JSON = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b'{"text":"\xff"}',
    b'{"text":"\\ud800"}',
    b'{"text":"a","sampling_params":{"temperature":NaN}}',
    b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
]
WRONG_TYPES = [
    ("/generate", b'{"text":5}'),
    ("/generate", b'{"text":"a","stream":"yes"}'),
    ("/abort_request", b'{"rid":5}'),
    ("/abort_request", b'{"abort_all":"yes"}'),
    ("/tokenize", b'{"prompt":5}'),
    ("/tokenize", b'{"prompt":"\\ud800"}'),
    ("/detokenize", b'{"tokens":[true]}'),
    ("/detokenize", b'{"tokens":[[1],2]}'),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [*itertools.product(["/generate", "/abort_request", "/tokenize"], BAD_JSON), *WRONG_TYPES],
    ids=itertools.count(),
)
def test_bodies_that_cannot_be_understood(served: Served, path: str, body: bytes) -> None:
    response = served[0].post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()
    assert error.keys() == {"object", "message", "type", "param", "code"}
    assert (error["object"], error["param"], error["code"]) == ("error", None, 400)


def test_the_content_type_must_be_json(served: Served) -> None:
    client, _, _ = served
    body = b'{"text":"a","sampling_params":{"max_new_tokens":1}}'
    for kind, status in (
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
    ):
        assert client.post("/generate", content=body, headers={"content-type": kind}).status_code == status
    assert client.post("/generate", content=body).status_code == 200


BAD_VALUES: list[dict[str, Any]] = [
    {"text": ""},
    {},
    {"input_ids": [VOCAB_SIZE]},
    {"input_ids": [2**70]},
    {"text": "a" * 256},
    {"text": "a", "sampling_params": {"max_new_tokens": 256}},
    {"text": "a", "sampling_params": {"top_p": 0}},
    {"text": "a", "sampling_params": {"unheard_of": 0}},
    {"text": "a", "sampling_params": {"json_schema": "{"}},
    {"text": "a", "rid": ["x"]},
    {"text": ["a"] * 4097},
]


@pytest.mark.parametrize("body", BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_bad_values(served: Served, body: dict[str, Any]) -> None:
    client, _, _ = served
    response = client.post("/generate", json=body)
    assert response.status_code == 400
    assert response.json().keys() == {"error"}
    message = response.json()["error"]["message"]
    # In a stream the same words come as its only event.
    (event,) = events(client.post("/generate", json={**body, "stream": True}))
    assert event == {"error": {"message": message}}


def test_failures_of_a_running_request(served: Served) -> None:
    client, _, _ = served
    for key, status in (("refuse", 503), ("break", 500)):
        response = client.post("/generate", json={"text": "a", "extra_key": key})
        assert response.status_code == status
        message = response.json()["error"]["message"]
        stream = client.post("/generate", json={"text": "a", "extra_key": key, "stream": True})
        assert events(stream) == [{"error": {"message": message}}]


def test_a_taken_request_id(served: Served) -> None:
    client, scheduler, _ = served
    body = {"text": "a", "rid": "taken", "stream": True, "sampling_params": LONG}
    with scheduler.slowly(), client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = client.post("/generate", json={"text": "b", "rid": "taken"})
        scheduler.round_seconds = 0.001
        assert refused.status_code == 400
        assert "taken" in refused.json()["error"]["message"]
        assert list(lines)[-2] == "data: [DONE]"
    assert generate(client, "b", rid="taken", sampling_params={"max_new_tokens": 1})["text"] == "b"


def test_abort(served: Served) -> None:
    client, scheduler, _ = served
    for body in ({"rid": ""}, {"rid": "unknown"}, {}):
        assert client.post("/abort_request", json=body).status_code == 200
    for streamed in (False, True):
        body = {"text": "abc", "rid": "r", "stream": streamed, "sampling_params": LONG}
        before = len(scheduler.of_type(GenerateReq))
        with scheduler.slowly(), ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.post, "/generate", json=body)
            scheduler.wait_for(GenerateReq, before + 1)
            assert client.post("/abort_request", json={"rid": "r"}).status_code == 200
            response = call.result(20)
        answer = events(response)[-1] if streamed else response.json()
        assert response.status_code == 200
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert ("abc" * 70).startswith(answer["text"])


def wait_for_abort(scheduler: MockScheduler, before: int, count: int) -> None:
    deadline = time.monotonic() + 15  # the calls would run for longer
    while sum(len(message.uids) for message in scheduler.of_type(AbortReq)) < before + count:
        assert time.monotonic() < deadline, "the disconnect was not noticed"
        time.sleep(0.01)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_is_aborted(served: Served, streamed: bool) -> None:
    client, scheduler, frontend = served
    before = sum(len(message.uids) for message in scheduler.of_type(AbortReq))
    asked = len(scheduler.of_type(GenerateReq))
    with scheduler.slowly():
        params = {**LONG, "n": 2}
        body = json.dumps({"text": "a", "stream": streamed, "sampling_params": params}).encode()
        host, port = frontend.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            scheduler.wait_for(GenerateReq, asked + 2)
            if streamed:
                raw.recv(100)
        wait_for_abort(scheduler, before, 2)
    assert client.post("/flush_cache").status_code == 200


def generated_tokens(client: httpx.Client) -> float:
    """Tokens of all calls that have ended."""
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("sglang:generation_tokens_total{")]
    return float(line.rpartition(" ")[2])


def test_a_client_that_reads_slowly_skips_chunks(served: Served) -> None:
    client, _, frontend = served
    # Long lists make long chunks, so that the buffers between the two ends fill up.
    fields = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True, "stream": True}
    params = {"max_new_tokens": 100, "stop": ["never there"]}
    body = json.dumps(
        {"text": "a" * 150, **fields, "top_logprobs_num": 200, "sampling_params": params}
    ).encode()
    host, port = frontend.url.removeprefix("http://").split(":")
    before = generated_tokens(client)
    deadline = time.monotonic() + 30
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        while generated_tokens(client) < before + 100:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        received = b""
        while b"[DONE]" not in received[-100:]:
            received += raw.recv(1 << 20)
    assert b'"length":100' in received
    assert received.count(b"data: {") < 50
    assert generate(client, "a", sampling_params={"max_new_tokens": 1})["text"] == "a"


def test_bodies_that_are_too_long(served: Served) -> None:
    client, _, _ = served
    long = b'{"text": "' + b"a" * MAX_BODY + b'"}'
    headers = {"content-type": "application/json"}
    for path in ("/generate", "/tokenize"):
        assert client.post(path, content=long, headers=headers).status_code == 413
        chunked = client.post(path, content=iter([long[:1000], long[1000:]]), headers=headers)
        assert chunked.status_code == 413
    assert generate(client, "a", sampling_params={"max_new_tokens": 1})["text"] == "a"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_learns_that_it_was_too_much(
    served: Served, chunked: bool
) -> None:
    host, port = served[2].url.removeprefix("http://").split(":")
    piece, count = b" " * (1 << 20), 16  # more than the buffers of a connection take
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (count * len(piece))
    with socket.create_connection((host, int(port)), timeout=100.0) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + length + b"\r\n\r\n")
        for _ in range(count):
            raw.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            raw.sendall(b"0\r\n\r\n")
        answer = b""
        while part := raw.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b'%d bytes"}}' % MAX_BODY)


def test_a_body_that_is_announced_too_long_is_refused_before_it_comes(served: Served) -> None:
    host, port = served[2].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=100.0) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
        answer = b""
        while part := raw.recv(1 << 16):  # to the end: the connection is not kept for ever
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_never_ends_holds_nothing_up(served: Served) -> None:
    client, scheduler, frontend = served
    before = len(scheduler.of_type(GenerateReq))
    host, port = frontend.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert generate(client, "a", sampling_params={"max_new_tokens": 1})["text"] == "a"
    assert len(scheduler.of_type(GenerateReq)) == before + 1


def test_fields_of_other_servers_are_ignored(served: Served) -> None:
    extra = {
        "bootstrap_host": "2.2.2.2",
        "lora_path": "x",
        "session_params": {},
        "return_hidden_states": True,
    }
    assert generate(served[0], "ab", sampling_params={"max_new_tokens": 2}, **extra)["text"] == "ab"


def test_many_at_once(served: Served) -> None:
    client, _, _ = served
    with ThreadPoolExecutor(16) as pool:
        texts = [f"number {index} 😀 " for index in range(100)]
        params = {"max_new_tokens": 30}
        answers = list(pool.map(lambda text: generate(client, text, sampling_params=params), texts))
    for text, answer in zip(texts, answers, strict=True):
        ids = answer["output_ids"]
        whole = bytes(token_id - 3 for token_id in ids).decode("utf-8", "replace")
        assert answer["text"] == whole
        assert whole.startswith(text)


def test_a_storm_of_aborts_and_disconnects(served: Served) -> None:
    client, scheduler, _ = served
    rng = random.Random(0)
    asked = len(scheduler.of_type(GenerateReq))

    def one(index: int) -> str:
        params = {"max_new_tokens": rng.randint(0, 60), "n": rng.randint(1, 3), "stop": ["3 "]}
        body = {"text": f"storm {index} ", "rid": f"storm-{index}", "sampling_params": params}
        body["stream"] = index % 2 == 0
        if index % 3 == 0:
            with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
                next(response.iter_lines())
            return "left"
        if index % 3 == 1:
            client.post("/abort_request", json={"rid": f"storm-{index - 3}"})
        response = client.post("/generate", json=body)
        answers = events(response) if body["stream"] else response.json()
        last = answers[-1] if isinstance(answers, list) else answers
        assert last["meta_info"]["finish_reason"] is not None
        return "answered"

    with ThreadPoolExecutor(12) as pool:
        ends = list(pool.map(one, range(240)))
    assert (ends.count("left"), ends.count("answered")) == (80, 160)
    assert len(scheduler.of_type(GenerateReq)) >= asked + 240
    deadline = time.monotonic() + 30
    while True:
        (state,) = client.get("/server_info").json()["internal_states"]
        if not state["waiting"] + state["running"]:
            break
        assert time.monotonic() < deadline, "requests of clients that left still run"
        time.sleep(0.02)
    # Every request id is free again.
    for index in (0, 1, 2):
        generate(client, "a", rid=f"storm-{index}", sampling_params={"max_new_tokens": 1})
