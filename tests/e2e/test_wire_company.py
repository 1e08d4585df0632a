"""A constrained program of SGLang's frontend language in a batch with free requests."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.models import rand_checkpoint
from tests.server import Server, running_server

sgl = pytest.importorskip("sglang")

FREE = 31
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A random model whose tokens leave after 1 to 4 loops."""
    folder = rand_checkpoint(tmp_path_factory.mktemp("rand"), threshold=0.7)
    flags = ("--max-running-requests", str(FREE + 1), "--num-slots", "65536", "--disable-radix-cache")
    with running_server(folder, *flags) as running:
        yield running


@sgl.function
def constrained(s: Any, number: int) -> None:
    s += f"Day {number}: "
    s += sgl.gen("day", regex=DATE, temperature=1.0, max_tokens=16)
    s += " has "
    s += sgl.gen("count", dtype=int, temperature=1.0, max_tokens=12)


def free(server: Server, number: int) -> list[Any]:
    """The bits of a free request."""
    sampling = {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": number}
    sampling["temperature"] = 0.0 if number % 2 else 0.9
    body = {"text": f"free {number} " * (1 + number % 4), "sampling_params": sampling, "return_logprob": True}
    answer = server.post("/generate", body)
    assert answer.status == 200, answer.body
    meta = answer.json()["meta_info"]
    return [answer.json()["output_ids"], meta["exit_depths"], meta["output_token_logprobs"]]


def test_a_program_beside_31_free_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    backend = sgl.RuntimeEndpoint(server.url)
    over = threading.Event()
    answers: list[tuple[str, str]] = []

    def program() -> None:
        while not over.is_set() or not answers:
            state = constrained.run(number=len(answers), backend=backend)
            answers.append((state["day"], state["count"]))

    with ThreadPoolExecutor(FREE) as pool:
        without = list(pool.map(lambda number: free(server, number), range(FREE)))
        assert {depth for bits in without for depth in bits[1]} == {1, 2, 3, 4}
        runner = threading.Thread(target=program)
        runner.start()
        try:
            beside = list(pool.map(lambda number: free(server, number), range(FREE)))
        finally:
            over.set()
            runner.join(200)
    assert not runner.is_alive()
    assert beside == without
    for day, count in answers:
        assert re.fullmatch(DATE, day)
        assert re.fullmatch(r"[-+]?[0-9]+", count), count
