"""Bodies that are broken, odd or huge, and how errors are told."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.reports.support import (
    CHAT,
    COMPLETIONS,
    LONG,
    NATIVE,
    SCRIPT_TOKENIZER,
    Client,
    digits,
    greedy,
    message,
    resident_bytes,
    strict_json,
    wait_for,
)

HELD_UP = 5 * 1.0  # seconds without a token that no stream may see
POSTED = (NATIVE, "/abort_request", COMPLETIONS, CHAT)

NOT_JSON = {
    "nothing": b"",
    "open": b"{",
    "comma": b'{"text":"a","prompt":"a",}',
    "null": b"null",
    "list": b"[]",
    "string": b'"x"',
    "number": b"5",
    "rubbish behind": b'{"text":"a","prompt":"a"} x',
    "two": b'{"text":"a","prompt":"a"}{}',
    "quotes": b"{'text':'a'}",
    "deep lists": b'{"text":"a","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"text":' * 10_000 + b"1" + b"}" * 10_000,
}


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
def test_htp_01_a_body_that_is_no_json_object(script: Client, path: str, body: bytes) -> None:
    response = script.post_raw(path, body)
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    error = strict_json(response.content)
    assert error["object"] == "error"
    assert error["code"] == 400
    assert error["message"]
    assert "Traceback" not in response.text


@pytest.mark.parametrize("path", POSTED)
def test_htp_01_a_body_that_is_announced_as_text(script: Client, path: str) -> None:
    body = json.dumps({"text": "s", "prompt": "s", "messages": message(), "rid": "nobody"}).encode()
    response = script.post_raw(path, body, "text/plain")
    assert response.status_code == 400
    assert strict_json(response.content)["code"] == 400
    assert script.post_raw(path, body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"text":"a\xffb","prompt":"a\xffb"}',
        b'{"text":"a\xc3","prompt":"a\xc3"}',
        b'{"text":"\xed\xa0\x80","prompt":"\xed\xa0\x80"}',  # half a character, as UTF-8 may not hold it
        b'{"text":"\\ud800","prompt":"\\ud800"}',
        '{"text":"a","prompt":"a"}'.encode("utf-16"),
        '{"text":"a","prompt":"a"}'.encode("utf-32"),
    ],
    ids=["ff", "cut", "surrogate", "escaped surrogate", "utf-16", "utf-32"],
)
def test_htp_04_bytes_that_are_no_text(script: Client, body: bytes) -> None:
    for path in (NATIVE, COMPLETIONS):
        response = script.post_raw(path, body)
        assert response.status_code == 400
        assert strict_json(response.content)["message"]


ODD = {
    "nul": "a\x00b",
    "not a character": "a\uffffb\ufffe",
    "combining": "e" + "\u0301" * 1000,
    "right to left": "\u202eabc\u200f\u05d0",
    "joined": "👩‍👩‍👧‍👦🏳️‍🌈",
    "highest": "\U0010ffff",
    "separators": "\u2028\u2029\u0085\x1f\x7f",
    "marker": "\ufeffa",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_htp_04_characters_that_are_rare(script: Client, text: str) -> None:
    ids = SCRIPT_TOKENIZER.encode(text, add_special_tokens=False).ids
    body = {"prompt": text, "echo": True, "max_tokens": 1, "temperature": 0}
    for raw in (json.dumps(body).encode(), json.dumps(body, ensure_ascii=False).encode()):
        answer = script.post_raw(COMPLETIONS, raw)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].startswith(text)
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    native = script.generate(text, greedy(1), return_prompt_token_ids=True)
    assert native["prompt_token_ids"] == ids
    back = script.post("/detokenize", {"tokens": ids, "skip_special_tokens": False}).json()
    assert back["text"] == text


def test_htp_04_a_byte_order_mark(script: Client) -> None:
    response = script.post_raw(NATIVE, b'\xef\xbb\xbf{"text":"s","sampling_params":{"max_new_tokens":1}}')
    assert response.status_code in (200, 400)


def test_htp_05_a_very_large_body(script: Client) -> None:
    """Beyond the limit: refused. Below it but beyond the context: refused too, and nobody waits for it."""
    frontend = script.pids()["ouro_sgl::frontend"]
    # Characters that become one token each, and words that are looked up again and again.
    texts = ["a" * 7_000_000, "Paris " * 1_100_000, "é" * 3_500_000]
    bodies = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    bodies += [json.dumps({"text": "a" * 20_000_000}).encode()]
    bodies += [b'{"input_ids":[' + b"1," * count + b"1]}" for count in (3_000_000, 10_000_000)]
    bodies += [json.dumps({"text": ["s"] * 10_000}).encode()]
    bodies += [json.dumps({"text": ["s"] * 4000 + ["a" * 9000]}).encode()]
    bodies += [json.dumps({"text": "s", "sampling_params": {"n": 10_000}}).encode()]
    # What is given once and belongs to each of many sequences.
    many = {"text": ["s"] * 2000}
    bodies += [json.dumps({**many, name: "r" * 7_000_000}).encode() for name in ("rid", "extra_key")]
    scored = {**many, "return_logprob": True, "token_ids_logprob": [1] * 2_000_000}
    bodies += [json.dumps(scored, separators=(",", ":")).encode()]
    for body in bodies[:3]:
        assert script.post_raw(NATIVE, body).status_code == 400  # what is loaded at first use, is
    before = resident_bytes(frontend)
    streams = []
    for number, body in enumerate(bodies):
        if not streams or streams[-1].chunks[-1]["meta_info"]["completion_tokens"] > 5000:  # of 7000
            streams.append(script.stream_text(LONG, greedy(7000)).wait_chunks())
        start = time.monotonic()
        status = script.post_raw(NATIVE, body).status_code
        assert status in (400, 413), (number, status)
        assert time.monotonic() - start < 5 * 10.0, number
    for stream in streams:
        stream.close()
        gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
        assert max(gaps) < HELD_UP
        assert stream.chunks[-1]["text"] == digits(len(stream.chunks[-1]["text"]))
    assert wait_for(lambda: resident_bytes(frontend) - before < 200 << 20), resident_bytes(frontend) - before


def test_htp_05_bodies_that_never_come_whole(script: Client) -> None:
    address = urlsplit(script.server.url)
    head = f"POST /generate HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    sockets = []
    for index in range(20):
        connection = socket.create_connection((address.hostname, address.port), timeout=30)
        sockets.append(connection)
        connection.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n" + b'{"text":"s"'[: index % 12])
    # One comes slowly but does come.
    body = b'{"text":"s","sampling_params":{"temperature":0,"max_new_tokens":7}}'
    slow = socket.create_connection((address.hostname, address.port), timeout=30)
    slow.sendall(head.encode() + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())

    def send_slowly() -> None:
        for index in range(len(body)):
            slow.sendall(body[index : index + 1])
            time.sleep(0.01)

    sender = threading.Thread(target=send_slowly)
    sender.start()
    with script.unharmed(sampling=greedy(100)):
        assert script.generate("w", greedy(4))["text"] == "."
        sender.join()
        answer = b""
        while part := slow.recv(65536):
            answer += part
        assert b"abcDEFg" in answer
    for connection in [*sockets, slow]:
        connection.close()
    assert script.nothing_runs()


def sent_errors(client: Client, path: str, body: dict[str, Any]) -> list[str]:
    """Messages of a streaming request that is refused."""
    stream = client.stream(path, body)
    chunks = stream.finish()
    assert stream.status in (200, 400)
    assert stream.done == (stream.status == 200)
    (chunk,) = chunks
    error = chunk.get("error", chunk)
    assert set(chunk) == {"error"} or chunk["object"] == "error"
    return [error["message"]]


@pytest.mark.parametrize(
    "params",
    [
        greedy(9000),
        greedy(4, temperature=-1),
        greedy(4, regex="a(b"),
        greedy(4, json_schema="{"),
        greedy(4, stop_regex="a(b"),
        greedy(4, min_loops=9),
    ],
    ids=["too long", "temperature", "regex", "json_schema", "stop_regex", "loops"],
)
def test_htp_06_an_error_of_a_stream(script: Client, params: dict[str, Any]) -> None:
    for text in ("s", ["s", "w"]):
        for told in sent_errors(script, NATIVE, {"text": text, "sampling_params": params}):
            assert told
            for word in ("Traceback", "Error(", "ouro_sgl", "<class", ".py"):
                assert word not in told
    params = dict(params)
    body = {"prompt": "s", "max_tokens": params.pop("max_new_tokens"), **params}
    assert sent_errors(script, COMPLETIONS, body)


def test_htp_06_abort_before_prefill(queue: Client) -> None:
    running = queue.stream_text(LONG, greedy(7000)).wait_chunks()
    waiting = queue.stream_text("s", greedy(8), rid="waits")
    assert wait_for(lambda: queue.state()["waiting"] == 1)
    queue.abort(rid="waits")
    last = waiting.finish()[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    running.close()
    assert queue.nothing_runs()


def test_htp_07_fields_of_a_server_s_inside(script: Client) -> None:
    inside = {
        "bootstrap_host": "2.2.2.2",
        "bootstrap_port": 8998,
        "bootstrap_room": 1,
        "lora_path": "x",
        "session_params": {"id": "s", "rid": "r", "offset": -1, "replace": True},
        "custom_logit_processor": '{"callable": "80049500"}',
        "data_parallel_rank": 7,
        "return_hidden_states": True,
        "input_embeds": [[0.0]],
        "image_data": "file:///etc/passwd",
        "uid": 1,
        "http_worker_ipc": "ipc:///tmp/x",
        "is_health_check": True,
        "leader": 1,
    }
    prompt = "a" * 700 + "s"
    with script.unharmed(sampling=greedy(100)):
        for fields in ({}, inside, *({name: value} for name, value in inside.items())):
            response = script.post(NATIVE, {"text": prompt, "sampling_params": greedy(7), **fields})
            assert response.status_code in (200, 400), fields
            if response.status_code == 200:
                assert response.json()["text"] == "abcDEFg"
        custom = greedy(7, custom_params={"x": 1}, custom_logit_processor="x")
        assert script.post(NATIVE, {"text": "s", "sampling_params": custom}).status_code == 400
