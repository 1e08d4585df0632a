"""Every other route, the life of the frontend process, and its keys."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ouro_sgl.messages import GenerateReq, ShutdownReq
from tests.frontend_server import VOCAB_SIZE, Frontend, running_frontend, write_echo_checkpoint
from tests.mock_scheduler import SLOW_ROUND, MockScheduler
from tests.models import byte_ids

Served = tuple[httpx.Client, MockScheduler]
LONG = {"max_new_tokens": 200}  # with slow rounds it runs until the test lets it end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_echo_checkpoint(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with running_frontend(folder) as frontend:
        scheduler = start_scheduler(frontend)
        try:
            frontend.wait_healthy()
            with frontend.client() as client:
                yield client, scheduler
        finally:
            scheduler.stop()


def start_scheduler(frontend: Frontend, **settings: Any) -> MockScheduler:
    scheduler = MockScheduler(frontend.ipc_dir, VOCAB_SIZE, **settings)
    scheduler.start()
    return scheduler


def test_model_info(served: Served, folder: Path) -> None:
    client, _ = served
    info = client.get("/get_model_info").json()
    assert info == client.get("/model_info").json()
    assert info["model_path"] == str(folder)
    assert (info["is_generation"], info["total_loops"], info["model_type"]) == (True, 4, "ouro")
    assert info["architectures"] == ["OuroForCausalLM"]
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("echo", "model", 256)


def test_server_info(served: Served) -> None:
    client, _ = served
    info = client.get("/server_info").json()
    assert info == client.get("/get_server_info").json()
    assert info["device"] == "mock"
    assert [state["running"] for state in info["internal_states"]] == [0]
    assert "api_key" not in info


def test_health(served: Served) -> None:
    client, _ = served
    for path in ("/health", "/health_generate"):
        response = client.get(path)
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(served: Served, method: str) -> None:
    client, scheduler = served
    assert client.request(method, "/flush_cache").status_code == 200
    body = {"text": "a", "stream": True, "sampling_params": LONG}
    with scheduler.slowly(), client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = client.request(method, "/flush_cache")
        scheduler.round_seconds = 0.001
        assert refused.status_code == 400
        assert "1 requests run" in refused.text
        assert list(lines)[-2] == "data: [DONE]"
    assert client.request(method, "/flush_cache").status_code == 200


def test_tokenize_and_detokenize(served: Served) -> None:
    client, _ = served
    assert client.post("/tokenize", json={"prompt": "aé"}).json() == {
        "tokens": byte_ids("aé"),
        "count": 3,
        "max_model_len": 256,
    }
    assert client.post("/tokenize", json={"prompt": ["a", ""]}).json()["count"] == [1, 0]
    for tokens, text in ((byte_ids("hé"), "hé"), ([byte_ids("a"), byte_ids("b")], ["a", "b"]), ([], "")):
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"text": text}
    shown = client.post("/detokenize", json={"tokens": [2], "skip_special_tokens": False})
    assert shown.json() == {"text": "<|im_end|>"}
    refused = client.post("/detokenize", json={"tokens": [VOCAB_SIZE]})
    assert (refused.status_code, "outside" in refused.json()["error"]["message"]) == (400, True)
    assert client.post("/detokenize", json={"tokens": ["a"]}).status_code == 400
    assert client.post("/tokenize", json={}).status_code == 400


def test_the_start_page_and_the_documentation(served: Served) -> None:
    client, _ = served
    page = client.get("/").text
    for word in ("echo", "up to 4", "256 tokens", "mock", 'href="docs"', 'href="metrics"', "ouro_sgl 0."):
        assert word in page
    assert client.get("/docs").status_code == 200
    schema = client.get("/openapi.json").json()
    assert {"post", "put"} <= schema["paths"]["/generate"].keys()
    fields = schema["components"]["schemas"]["GenerateDoc"]["properties"]
    assert "sampling_params" in fields
    assert "exit_threshold" in schema["components"]["schemas"]["SamplingParamsDoc"]["properties"]


def test_metrics(served: Served) -> None:
    client, scheduler = served

    def value(name: str, text: str | None = None) -> float:
        text = text or client.get("/metrics").text
        (line,) = [line for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
        return float(line.rpartition(" ")[2])

    before = value("num_requests_total"), value("generation_tokens_total")
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 3}}
    client.post("/generate", json=body)
    client.get("/health_generate")
    client.post("/generate", json={"text": ""})
    assert (value("num_requests_total"), value("generation_tokens_total")) == (before[0] + 2, before[1] + 6)
    assert [value(name) for name in ("num_running_reqs", "num_queue_reqs", "token_usage")] == [0, 0, 0]
    endless = {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 200}}
    pace, scheduler.round_seconds = scheduler.round_seconds, 0.1
    try:
        with client.stream("POST", "/generate", json=endless) as stream:
            next(stream.iter_lines())
            text = client.get("/metrics").text
    finally:
        scheduler.round_seconds = pace
    assert value("num_running_reqs", text) + value("num_queue_reqs", text) == 2
    assert value("token_usage", text) == 2 * 4 / 4096


def test_unknown_routes_and_methods(served: Served) -> None:
    client, _ = served
    missing = client.get("/nothing")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    for path in ("/generate", "/abort_request"):
        wrong = client.get(path)
        assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    assert client.patch("/generate", content=b"{}").status_code in (404, 405)


def test_a_body_that_nobody_reads_may_be_anything(served: Served) -> None:
    client, _ = served
    form = {"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}
    for method, path, status in (
        ("POST", "/v1/audio/transcriptions", 404),
        ("PUT", "/nothing", 404),
        ("POST", "/get_model_info", 405),
        ("PUT", "/abort_request", 405),
        ("POST", "/continue_generation", 200),
        ("POST", "/abort_request", 400),
    ):
        response = client.request(method, path, **form)
        assert response.status_code == status, (method, path)
        if status == 404:
            assert response.json() == {"detail": "Not Found"}


def test_the_body_of_a_get_is_read_as_any_other(served: Served) -> None:
    client, _ = served
    json_type = {"content-type": "application/json"}
    for content, status in ((b'{"output_dir": "\\ud800"}', 400), (b" " * (9 << 20), 413)):
        response = client.request("GET", "/start_profile", content=content, headers=json_type)
        assert response.status_code == status
        assert "body" in response.text


def test_the_api_key(folder: Path) -> None:
    with running_frontend(folder, api_key="secret") as frontend, frontend.client() as client:
        scheduler = start_scheduler(frontend)
        try:
            frontend.wait_healthy()
            body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                assert client.post("/generate", json=body, headers=headers).status_code == 401
                assert client.get("/server_info", headers=headers).status_code == 401
            right = {"Authorization": "Bearer secret"}
            assert client.post("/generate", json=body, headers=right).status_code == 200
            assert "secret" not in client.get("/server_info", headers=right).text
            assert client.get("/health_generate").status_code == 200
        finally:
            scheduler.stop()


def test_before_the_scheduler_is_ready(folder: Path) -> None:
    with running_frontend(folder) as frontend, frontend.client() as client:
        frontend.wait_healthy(status=503)
        assert client.get("/health").content == b""
        assert client.get("/health_generate").status_code == 503
        assert "not ready" in client.get("/").text
        for stream in (False, True):
            refused = client.post("/generate", json={"text": "a", "stream": stream})
            assert refused.status_code == 503
            assert "starting" in refused.json()["error"]["message"]
        for path in ("/get_model_info", "/server_info", "/v1/models", "/flush_cache"):
            assert client.get(path).status_code == 503
        metrics = client.get("/metrics").text
        assert "sglang:num_refused_requests_total{" in metrics
        assert "sglang:num_running_reqs" not in metrics  # nobody knows yet
        scheduler = start_scheduler(frontend)
        try:
            frontend.wait_healthy()
            assert client.post("/generate", json={"text": "a"}).status_code == 200
        finally:
            scheduler.stop()


def start_call(
    client: httpx.Client, pool: ThreadPoolExecutor, scheduler: MockScheduler, stream: bool = False
) -> Any:
    """A call that runs."""
    body = {"text": "a", "stream": stream, "sampling_params": LONG}
    call = pool.submit(client.post, "/generate", json=body)
    scheduler.wait_for(GenerateReq, 1)
    return call


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_finish(folder: Path, signum: int) -> None:
    with running_frontend(folder) as frontend, frontend.client() as client, ThreadPoolExecutor(1) as pool:
        scheduler = start_scheduler(frontend, round_seconds=SLOW_ROUND)
        frontend.wait_healthy()
        call = start_call(client, pool, scheduler)
        frontend.process.send_signal(signum)
        frontend.wait_healthy(status=503)
        assert client.post("/generate", json={"text": "a"}).status_code == 503
        scheduler.round_seconds = 0.001
        answer = call.result(100).json()
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
        assert frontend.process.wait(100) == 0
        scheduler.join(100)
        assert scheduler.of_type(ShutdownReq)


@pytest.mark.parametrize("again", [False, True])
def test_requests_that_run_too_long_are_aborted(folder: Path, again: bool) -> None:
    timeout = 100.0 if again else 0.3
    with (
        running_frontend(folder, shutdown_timeout=timeout) as frontend,
        frontend.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        scheduler = start_scheduler(frontend, round_seconds=SLOW_ROUND)
        frontend.wait_healthy()
        call = start_call(client, pool, scheduler)
        frontend.process.send_signal(signal.SIGTERM)
        if again:
            frontend.wait_healthy(status=503)  # the first signal has arrived
            frontend.process.send_signal(signal.SIGTERM)
        answer = call.result(100).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert frontend.process.wait(100) == 0
        scheduler.join(100)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_death_of_a_child_ends_calls_and_process(folder: Path, streamed: bool) -> None:
    with running_frontend(folder) as frontend, frontend.client() as client, ThreadPoolExecutor(1) as pool:
        scheduler = start_scheduler(frontend, round_seconds=SLOW_ROUND)
        frontend.wait_healthy()
        call = start_call(client, pool, scheduler, streamed)
        frontend.lose_child("the worker process was killed")
        response = call.result(100)
        if streamed:
            *_, event, done = [block for block in response.text.split("\n\n") if block]
            assert done == "data: [DONE]"
            error = json.loads(event.removeprefix("data: "))
        else:
            assert response.status_code == 503
            error = response.json()
        assert error == {"error": {"message": "the worker process was killed"}}
        assert frontend.process.wait(100) == 1
        assert frontend.process.stderr is not None
        assert "the worker process was killed" in frontend.process.stderr.read()
        scheduler.stop()


def test_a_child_that_dies_during_start_up_ends_the_process(folder: Path) -> None:
    with running_frontend(folder) as frontend:
        frontend.wait_healthy(status=503)
        frontend.lose_child("the worker process ended with exit code 1")
        assert frontend.process.wait(100) == 1


def test_the_exit_trace_is_written_at_the_end(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with running_frontend(folder, record_exit_trace=str(path)) as frontend, frontend.client() as client:
        scheduler = start_scheduler(frontend)
        frontend.wait_healthy()
        body = {"text": "a", "rid": "x", "sampling_params": {"max_new_tokens": 3}}
        assert client.post("/generate", json=body).status_code == 200
        frontend.process.send_signal(signal.SIGTERM)
        assert frontend.process.wait(100) == 0
        scheduler.join(100)
    assert json.loads(path.read_text()) == {"depths_by_request": {"x": [4, 1, 2]}}


def test_a_record_whose_place_has_gone_is_an_error_of_one_line(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with running_frontend(folder, record_exit_trace=str(place / "trace.json")) as frontend:
        scheduler = start_scheduler(frontend)
        frontend.wait_healthy()
        place.rmdir()
        frontend.process.send_signal(signal.SIGTERM)
        assert frontend.process.wait(100) == 1
        assert frontend.process.stderr is not None
        said = frontend.process.stderr.read()
        assert "the exit depths could not be recorded" in said
        assert str(place) in said
        assert "Traceback" not in said
        scheduler.join(100)
