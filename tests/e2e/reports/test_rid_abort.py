"""Names of requests, and ending them from outside."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.e2e.reports.support import LETTERS, LONG, NATIVE, Client, Stream, digits, greedy, letters

QUICKLY = 5 * 1.0  # seconds, with slack for a loaded machine


def is_abort(chunk: Any) -> bool:
    return (chunk["meta_info"]["finish_reason"] or {}).get("type") == "abort"


def test_abt_01_a_name_that_is_taken(script: Client) -> None:
    first = script.stream_text(LONG, greedy(7000), rid="x").wait_chunks()
    start = time.monotonic()
    second = script.post(NATIVE, {"text": "s", "rid": "x", "sampling_params": greedy(8)})
    assert time.monotonic() - start < 2 * QUICKLY
    assert second.status_code == 400
    assert "x" in second.json()["error"]["message"]
    in_a_batch = script.post(NATIVE, {"text": ["s", "w"], "rid": ["y", "x"], "sampling_params": greedy(8)})
    assert in_a_batch.status_code == 400
    first.wait_chunks(len(first.chunks) + 3)  # it goes on
    assert script.abort(rid="x").status_code == 200
    assert digits(7000).startswith(first.text())
    assert is_abort(first.chunks[-1])
    assert script.generate("s", greedy(8), rid="x")["text"] == "abcDEFg"
    assert script.generate("s", greedy(8), rid="y")["text"] == "abcDEFg"


def test_abt_03_abort_of_a_request_that_waits(queue: Client) -> None:
    running = queue.stream_text(LONG, greedy(7000), rid="a").wait_chunks()
    waiting = queue.stream_text("s", greedy(8), rid="b")
    calls = [
        lambda: queue.generate("sss", greedy(8), rid="c"),
        lambda: queue.generate(["s", "w"], greedy(8), rid="d"),
        lambda: abort_those_that_wait(queue),
    ]
    plain, batch, start = queue.at_once(calls)
    ends = [*waiting.finish(), plain, *batch]
    assert time.monotonic() - start < QUICKLY
    running.wait_chunks(len(running.chunks) + 3)  # it goes on
    for end, prompt_tokens in zip(ends, (1, 3, 1, 1), strict=True):
        assert is_abort(end)
        assert "before prefill" in end["meta_info"]["finish_reason"]["message"]
        assert (end["text"], end["output_ids"]) == ("", [])
        assert end["meta_info"]["completion_tokens"] == 0
        assert end["meta_info"]["prompt_tokens"] == prompt_tokens
    assert queue.abort(rid="a").status_code == 200
    assert digits(7000).startswith(running.text())
    assert is_abort(running.chunks[-1])
    assert queue.is_idle()


def abort_those_that_wait(queue: Client) -> float:
    """Once four requests wait; the time of the abort."""
    deadline = time.monotonic() + 30
    while queue.state()["waiting"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for rid in "bcd":
        assert queue.abort(rid=rid).status_code == 200
    return time.monotonic()


@pytest.mark.parametrize("rounds_in_flight", [1, 4])
def test_abt_04_abort_of_a_running_request(script: Client, queue: Client, rounds_in_flight: int) -> None:
    client = script if rounds_in_flight == 1 else queue
    rng = random.Random(4)
    assert client.is_idle()
    free = client.state()["free_slots"]
    for number in range(12):
        # The second prompt is answered in characters of two tokens: half a one at the end is no text.
        prompt, whole, size = [(LONG, digits(7000), 1), (LETTERS, letters(3500), 2)][number % 2]
        stream = client.stream_text(prompt, greedy(7000), rid="r").wait_chunks(rng.randint(1, 30))
        time.sleep(rng.random() * 0.01)
        start = time.monotonic()
        assert client.abort(rid="r").status_code == 200
        text = stream.text(QUICKLY)
        assert time.monotonic() - start < QUICKLY
        last = stream.chunks[-1]
        assert is_abort(last)
        assert "before prefill" not in last["meta_info"]["finish_reason"]["message"]
        assert whole.startswith(text)
        assert len(text) == last["meta_info"]["completion_tokens"] // size < 3500
        # A plain request keeps what it had, too.
        if number % 5 == 0:
            plain, _ = client.at_once(
                [
                    lambda prompt=prompt: client.generate(prompt, greedy(7000), rid="p"),
                    lambda: (client.wait_running(), client.abort(rid="p")),
                ]
            )
            assert is_abort(plain)
            assert whole.startswith(plain["text"])
    assert client.is_idle(QUICKLY)
    assert client.state()["free_slots"] == free
    written = len(client.server.log())
    assert client.generate(LONG, greedy(20))["text"] == digits(20)
    assert client.nothing_runs()
    assert "Traceback" not in client.server.log()
    assert len(client.server.log()) - written < 4000


def test_abt_07_abort_all_nothing_and_the_unknown(script: Client, queue: Client) -> None:
    streams = [script.stream_text(LONG, greedy(7000), rid=f"name{index}") for index in range(3)]
    for stream in streams:
        stream.wait_chunks()
    # "nam" begins like their names, "name" too.
    for body in ({"rid": ""}, {"rid": "nope"}, {}, {"rid": "name"}, {"rid": None}, {"abort_all": False}):
        assert script.abort(**body).status_code in (200, 400)
    seen = [len(stream.chunks) for stream in streams]
    for stream, count in zip(streams, seen, strict=True):
        stream.wait_chunks(count + 3)
        assert not is_abort(stream.chunks[-1])
    assert script.abort(abort_all=True).status_code == 200
    assert all_aborted(streams)

    # The same with some that wait: one runs, two wait.
    streams = [queue.stream_text(LONG, greedy(7000)) for _ in range(3)]
    deadline = time.monotonic() + 30
    while queue.state()["waiting"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert queue.abort(abort_all=True).status_code == 200
    assert all_aborted(streams)
    for client in (script, queue):
        assert client.is_idle(QUICKLY)


def all_aborted(streams: list[Stream]) -> bool:
    return all(
        is_abort(stream.finish(QUICKLY)[-1]) and digits(7000).startswith(stream.chunks[-1]["text"])
        for stream in streams
    )


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("batch", [False, True], ids=["n", "batch"])
def test_abt_09_all_children_end(script: Client, how: str, batch: bool) -> None:
    params = greedy(3000, n=1 if batch else 8)
    stream = script.stream(
        NATIVE, {"text": [LONG] * 8 if batch else LONG, "rid": "parent", "sampling_params": params}
    )
    stream.wait_chunks(8)
    assert script.state()["running"] >= 1
    if how == "close":
        stream.close()
    else:
        assert script.abort(rid="parent").status_code == 200
        ends = [chunk for chunk in stream.finish(QUICKLY) if chunk["meta_info"]["finish_reason"]]
        assert len(ends) == 8
        assert all(is_abort(end) for end in ends)
    assert script.nothing_runs(5 * QUICKLY)
    assert script.flush()
    assert script.generate("s", greedy(8), rid="parent")["text"] == "abcDEFg"
