"""What open calls get when a process dies, or when the server is told to stop."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_processes import family, temporary, wait_for
from tests.models import rand_checkpoint
from tests.server import Server, alive, running_server

__all__ = ["temporary"]  # a fixture

CALLS = 12
LONG = 4000  # new tokens of a call that does not end by itself; the slots are enough for all calls
SLOTS = str(CALLS * 4 * (LONG + 8))
PATIENCE = 100.0  # seconds; several times what an ending may take


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("model"), max_position=32768)


class Calls:
    """Calls on a server, half of them streams; all have begun when the constructor returns.

    The streams have seen their first event, and the server has taken in all calls.
    """

    def __init__(self, server: Server, pool: ThreadPoolExecutor, new_tokens: int) -> None:
        self.url = server.url
        started = threading.Semaphore(0)
        self.futures: list[Future[tuple[int, list[Any]]]] = [
            pool.submit(self._call, new_tokens, bool(number % 2), started) for number in range(CALLS)
        ]
        for _ in range(CALLS // 2):
            assert started.acquire(timeout=100)
        info = "/server_info"
        assert wait_for(lambda: server.get(info).json()["internal_states"][0]["requests"] == CALLS)

    def _call(self, new_tokens: int, stream: bool, started: threading.Semaphore) -> tuple[int, list[Any]]:
        """Status and the events of a stream, or the answer as the only one."""
        body = {
            "input_ids": [5, 6, 7],
            "stream": stream,
            "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True},
        }
        with (
            httpx.Client(trust_env=False, timeout=200.0) as client,
            client.stream("POST", self.url + "/generate", json=body) as response,
        ):
            if not stream:
                return response.status_code, [json.loads(response.read())]
            events = []
            for line in response.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    if len(events) == 1:
                        started.release()
            assert events.pop() == "[DONE]"
            return response.status_code, [json.loads(event) for event in events]

    def results(self, timeout: float) -> Iterator[tuple[int, Any]]:
        """Status and last event of every call, which all end within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for future in self.futures:
            status, events = future.result(max(0.0, deadline - time.monotonic()))
            yield status, events[-1]


@pytest.mark.parametrize("name", ["ouro_sgl::scheduler", "ouro_sgl::worker"])
def test_a_process_dies_under_open_calls(model: Path, temporary: Path, name: str) -> None:
    """Each call ends with an error, the server with a code; no process and no directory is left."""
    with ThreadPoolExecutor(CALLS) as pool, running_server(model, "--num-slots", SLOTS) as server:
        calls = Calls(server, pool, LONG)
        pids = family(server.process.pid)
        os.kill(pids[name], signal.SIGKILL)
        for index, (status, last) in enumerate(calls.results(PATIENCE)):
            assert last.keys() == {"error"}, last
            assert status == (200 if index % 2 else 503)
        assert server.process.wait(PATIENCE) == 1
        assert wait_for(lambda: not any(alive(pid) for pid in pids.values()))
        assert not list(temporary.glob("ouro_sgl-*"))
        assert name.removeprefix("ouro_sgl::") in server.log()


def test_a_stop_lets_open_calls_finish(model: Path) -> None:
    flags = ["--num-slots", SLOTS, "--shutdown-timeout", str(PATIENCE)]
    with ThreadPoolExecutor(CALLS) as pool, running_server(model, *flags) as server:
        calls = Calls(server, pool, 100)
        server.process.send_signal(signal.SIGTERM)
        for status, last in calls.results(PATIENCE):
            assert status == 200
            assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 100}
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("retracted", [False, True])
def test_a_stop_aborts_what_takes_too_long(model: Path, temporary: Path, retracted: bool) -> None:
    flags = ["--num-slots", SLOTS, "--shutdown-timeout", "0.5"]
    with ThreadPoolExecutor(CALLS) as pool, running_server(model, *flags) as server:
        calls = Calls(server, pool, LONG)
        pids = family(server.process.pid)
        if retracted:
            assert server.post("/pause_generation", {"mode": "retract"}).status == 200
        server.process.send_signal(signal.SIGTERM)
        for status, last in calls.results(PATIENCE):
            assert status == 200
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"]
        assert server.process.wait(PATIENCE) == 0
        assert wait_for(lambda: not any(alive(pid) for pid in pids.values()))
        assert not list(temporary.glob("ouro_sgl-*"))
        assert "Traceback" not in server.log()
