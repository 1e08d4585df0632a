"""Reported faults of the K/V pool: who gets in, who ends, what comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.reports.conftest import Serve
from tests.e2e.reports.runtime import Runtime
from tests.e2e.reports.support import DIGITS, LONG, NATIVE, Client, digits, greedy
from tests.models import byte_ids
from tests.worker_driver import Model

POOL = 256  # tokens
WHOLE = 300  # of the fixture ``small``


@pytest.fixture(scope="module")
def tight(serve: Serve, script_model: Path) -> Client:
    """A pool that is smaller than the context; prompts are never cut, and exceed what one step admits."""
    flags = (
        f"--max-total-tokens {POOL} --context-length 1024 --chunked-prefill-size -1 --max-prefill-tokens 64"
    )
    return serve(script_model, *flags.split())


def fives(count: int) -> list[int]:
    return byte_ids(LONG) * count


def after(answer: Any) -> str:
    return digits(len(answer["output_ids"]))


def test_kvp_01_a_request_that_can_never_fit_blocks_nobody(tight: Client) -> None:
    begin = time.monotonic()
    calls: list[Callable[[], Any]] = [
        lambda: tight.post(NATIVE, {"input_ids": fives(300), "sampling_params": greedy(4)}),
        lambda: tight.post(NATIVE, {"input_ids": fives(5), "sampling_params": greedy(4)}),
    ]
    refused, served = tight.at_once(calls)
    assert time.monotonic() - begin < 5 * 2
    assert refused.status_code == 400
    words = refused.json()["error"]["message"]
    assert "300" in words
    assert str(POOL) in words
    assert served.json()["text"] == digits(4)


def test_kvp_03_the_only_request_fills_the_pool(tight: Client) -> None:
    # An explicit length that cannot be kept is refused with its reason.
    body = {"input_ids": fives(200), "sampling_params": greedy(500, ignore_eos=True)}
    refused = tight.post(NATIVE, body)
    assert refused.status_code == 400
    assert str(POOL) in refused.json()["error"]["message"]
    # "As long as it goes" goes to the pool's last slot, alone and two at once.
    endless = greedy(None, ignore_eos=True)  # type: ignore[arg-type]
    answers = [tight.generate(fives(200), endless)]
    answers += tight.at_once([lambda: tight.generate(fives(199), endless)] * 2)
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] + meta["completion_tokens"] == POOL
        assert meta["finish_reason"]["type"] == "length"
        assert answer["text"] == after(answer)
    assert tight.generate(LONG, greedy(3))["text"] == digits(3)


def test_kvp_05_everything_is_given_back(small: Client) -> None:
    """All kinds of endings; then the books balance and nearly the whole pool serves one request."""
    rng = random.Random(5)
    pids = small.pids()
    bases = [[rng.randrange(3, 259) for _ in range(60)] for _ in range(4)]

    def ids() -> list[int]:
        base = rng.choice(bases)[: rng.randrange(60)]
        return base + [rng.randrange(3, 259) for _ in range(rng.randrange(1, 20))]

    def sampling(**others: Any) -> dict[str, Any]:
        return {"max_new_tokens": rng.randrange(1, 16), "temperature": 1.0, **others}

    def aborted(body: dict[str, Any], rid: str, delay: float) -> int:
        stream = small.stream(NATIVE, {**body, "rid": rid})
        time.sleep(delay)
        small.abort(rid=rid)
        return len(stream.finish())

    def hung_up(body: dict[str, Any]) -> None:
        small.stream(NATIVE, body).wait_chunks().close()

    def make(index: int) -> Callable[[], Any]:
        body = {"input_ids": ids(), "sampling_params": sampling()}
        kind = index % 8
        if kind == 0:
            return lambda: small.post(NATIVE, body).status_code == 200
        if kind == 1:
            body["sampling_params"] = sampling(stop=["a", "e", "é"], max_new_tokens=40)
            return lambda: small.post(NATIVE, body).status_code == 200
        if kind == 2:
            body["sampling_params"] = sampling(max_new_tokens=60, ignore_eos=True)
            delay = rng.random() * 0.1
            return lambda: aborted(body, f"storm-{index}", delay) > 0
        if kind == 3:
            body["sampling_params"] = sampling(max_new_tokens=100, ignore_eos=True)
            return lambda: hung_up(body) is None
        if kind == 4:
            body["sampling_params"] = sampling(n=3)
            return lambda: len(small.post(NATIVE, body).json()) == 3
        if kind == 5:
            body["sampling_params"] = rng.choice([{"top_p": 0}, {"max_new_tokens": 10**6}, {"n": 0}])
            return lambda: small.post(NATIVE, body).status_code == 400
        if kind == 6:
            body["input_ids"] = bases[0]
            return lambda: small.post(NATIVE, body).status_code == 200
        body["sampling_params"] = sampling(max_new_tokens=0)
        return lambda: small.post(NATIVE, {**body, "return_logprob": True}).status_code == 200

    def capacity() -> dict[str, Any]:
        longest = WHOLE - 1
        too_long = {"input_ids": [5] * (longest + 1), "sampling_params": greedy(1)}
        assert small.post(NATIVE, too_long).status_code == 400
        answer = small.generate([rng.randrange(3, 259) for _ in range(longest)], greedy(1))
        assert answer["meta_info"]["prompt_tokens"] == longest
        state: dict[str, Any] = small.get("/server_info").json()["internal_states"][0]
        assert state["free_slots"] + state["cached_slots"] == state["num_slots"]
        assert state["evictable_slots"] == state["cached_slots"]
        assert (state["reserved_slots"], state["free_rows"]) == (0, state["rows"])
        return state

    assert small.is_idle()
    capacity()
    calls = [make(index) for index in range(120)]
    for start in range(0, len(calls), 20):
        assert all(small.at_once(calls[start : start + 20]))
    assert small.is_idle()
    time.sleep(1.5)  # longer than the quiet time after which an idle scheduler checks its books
    capacity()
    assert small.flush()
    assert small.pids() == pids
    log = small.server.log()
    assert "Traceback" not in log
    assert " ERROR " not in log


def test_kvp_08_every_free_place_is_used(script_model: Path) -> None:
    """Four cold prompts that end in the middle of chunks: all four decode side by side."""
    torch.set_num_threads(1)
    runtime = Runtime(Model(script_model), rows=4, chunked_prefill_size=32, num_slots=16384)
    rng = random.Random(8)
    prompts = [[rng.randrange(3, 259) for _ in range(39)] + byte_ids(LONG) for _ in range(4)]
    uids = [runtime.submit(ids, max_new_tokens=60) for ids in prompts]
    for _ in range(10_000):
        runtime.turn()
        if all(runtime.heard[uid].ids for uid in uids):
            break
    # The fourth has begun while the first is far from its end, and nobody waits from here on.
    assert all(len(runtime.heard[uid].ids) < 30 for uid in uids)
    runtime.run()
    for uid in uids:
        assert bytes(token - 3 for token in runtime.heard[uid].ids).decode() == digits(60)
    assert set(digits(60)) == set(DIGITS)
