"""A storm on a real server: every request is answered exactly once, and nothing is left behind.

The pool holds a tenth of what the rows would like to have. Clients stream or not, ask for several
samples, abort by id, go away before the answer or in the middle of it. ``OURO_STORM`` sets the number
of requests for each layout (default 500).
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.test_processes import family
from tests.models import rand_checkpoint
from tests.server import Server, running_server

REQUESTS = int(os.environ.get("OURO_STORM", "500"))
CLIENTS = 64
ROWS = 16
LOOPS = 4
PROMPT = 60  # tokens of most prompts, of which many share a part
NEW_TOKENS = 12
NUM_SLOTS = ROWS * LOOPS * (PROMPT + NEW_TOKENS) // 10
LONGEST = NUM_SLOTS // LOOPS  # served length
PATIENCE = 200.0  # seconds until a silent server counts as hung


@dataclass
class Plan:
    """What one client does."""

    body: dict[str, Any]
    sequences: int
    abort_after: float | None = None  # seconds
    leave_after: float | None = None  # seconds
    refused: bool = False


@dataclass
class Tally:
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    left: int = 0
    refused: int = 0
    sequences: int = 0  # of calls whose answer was read to the end


def make_plan(rng: random.Random, number: int, prompts: list[list[int]]) -> Plan:
    base = rng.choice(prompts)
    prompt = base[: rng.randint(1, len(base))] + [rng.randrange(3, 259) for _ in range(rng.randint(1, 20))]
    prompt = prompt[: LONGEST - NEW_TOKENS]
    samples = rng.choice([1, 1, 1, 1, 2, 3])
    low = rng.randint(1, LOOPS)
    sampling: dict[str, Any] = {
        "max_new_tokens": rng.choice([0, 1, 2, rng.randint(1, NEW_TOKENS), NEW_TOKENS]),
        "temperature": rng.choice([0.0, 1.0]),
        "n": samples,
        "exit_threshold": rng.choice([0.3, 0.6, 0.8, 1.0]),
        "min_loops": low,
        "max_loops": rng.randint(low, LOOPS),
        "exit_mode": rng.choice(["ouro", "ouro_delayed", "random_lookahead"]),
    }
    if rng.random() < 0.3:
        sampling["stop"] = [chr(rng.randrange(97, 123)) for _ in range(3)]
    if rng.random() < 0.2:
        sampling["ignore_eos"] = True
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": sampling,
        "rid": f"storm-{number}",
        "stream": rng.random() < 0.5,
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "extra_key": rng.choice([None, None, None, "other"]),
    }
    if rng.random() < 0.2:
        body |= {"return_logprob": True, "logprob_start_len": rng.randint(-1, len(prompt))}
    plan = Plan(body, samples)
    fate = rng.random()
    delay = rng.choice([0.0, rng.random() * 0.2, rng.random()])
    if fate < 0.15:
        plan.abort_after = delay
    elif fate < 0.30:
        plan.leave_after = delay
    elif fate < 0.33:
        plan.refused = True
        sampling["max_new_tokens"] = LONGEST
    return plan


class Client:
    """Just enough HTTP to leave in the middle of an answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname, parts.port

    async def open(
        self, path: str, body: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return reader, writer

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and whole body; a body of a stream is without its transfer coding."""
        reader, writer = await self.open(path, body)
        try:
            head, _, payload = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
            await writer.wait_closed()
        assert head, "the connection was closed without an answer"
        if b"transfer-encoding: chunked" in head.lower():
            payload = dechunk(payload)
        return int(head.split()[1]), payload


def dechunk(data: bytes) -> bytes:
    parts = []
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert data == b"\r\n", "something follows the last chunk"
            return b"".join(parts)
        parts.append(data[:length])
        data = data[length + 2 :]


def final_answers(plan: Plan, payload: bytes) -> list[dict[str, Any]]:
    """The finished sequences of an answer; checks that each is finished exactly once."""
    if plan.body["stream"]:
        *lines, end = [line for line in payload.split(b"\n\n") if line]
        assert end == b"data: [DONE]"
        answers = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        answers = [a for a in answers if "error" in a or a["meta_info"]["finish_reason"] is not None]
    else:
        answer = json.loads(payload)
        answers = answer if isinstance(answer, list) else [answer]
    if plan.refused:
        assert len(answers) == 1
        assert "served" in str(answers) or "context" in str(answers) or "slots" in str(answers), answers
        return []
    ids = [answer["meta_info"]["id"] for answer in answers]
    rid = plan.body["rid"]
    wanted = [rid] if plan.sequences == 1 else [f"{rid}_{i}" for i in range(plan.sequences)]
    assert sorted(ids) == wanted, (ids, wanted)
    return answers


def check_answer(plan: Plan, answer: dict[str, Any]) -> str:
    meta, params = answer["meta_info"], plan.body["sampling_params"]
    count = meta["completion_tokens"]
    assert len(answer["output_ids"]) == len(meta["exit_depths"]) == count <= params["max_new_tokens"]
    assert all(params["min_loops"] <= d <= params["max_loops"] for d in meta["exit_depths"][1:])
    reason: str = meta["finish_reason"]["type"]
    if reason == "length":
        assert count == params["max_new_tokens"]
    elif reason == "abort":
        assert plan.abort_after is not None
    if plan.body.get("return_logprob") and reason != "abort":
        assert len(meta["output_token_logprobs"]) == count
    return reason


async def run_client(client: Client, plan: Plan, tally: Tally) -> None:
    async def abort() -> None:
        assert plan.abort_after is not None
        await asyncio.sleep(plan.abort_after)
        status, _ = await client.post("/abort_request", {"rid": plan.body["rid"]})
        assert status == 200

    if plan.leave_after is not None:
        _, writer = await client.open("/generate", plan.body)
        await asyncio.sleep(plan.leave_after)
        writer.transport.abort()
        tally.left += 1
        return
    aborting = asyncio.create_task(abort()) if plan.abort_after is not None else None
    status, payload = await asyncio.wait_for(client.post("/generate", plan.body), PATIENCE)
    assert status == (400 if plan.refused and not plan.body["stream"] else 200), payload
    answers = final_answers(plan, payload)
    tally.refused += plan.refused
    tally.sequences += len(answers)
    tally.reasons.update(check_answer(plan, answer) for answer in answers)
    if aborting is not None:
        await aborting


async def storm(server: Server, seed: int) -> Tally:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 259) for _ in range(PROMPT)] for _ in range(6)]
    plans = iter([make_plan(rng, number, prompts) for number in range(REQUESTS)])
    tally, client = Tally(), Client(server.url)

    async def work() -> None:
        for plan in plans:
            await run_client(client, plan, tally)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(work())
    return tally


def state(server: Server) -> dict[str, Any]:
    info: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]
    return info


def wait_idle(server: Server) -> dict[str, Any]:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        info = state(server)
        if not any(info[name] for name in ("waiting", "prefilling", "running", "draining")):
            return info
        time.sleep(0.05)
    raise AssertionError(f"requests are left: {state(server)}")


def capacity(server: Server) -> list[Any]:
    """What a request gets that needs every slot of the pool."""
    body = {
        "input_ids": list(range(3, 3 + LONGEST // 2)),
        "sampling_params": {
            "max_new_tokens": LONGEST - LONGEST // 2,
            "temperature": 0.0,
            "ignore_eos": True,
            "exit_threshold": 0.6,
        },
    }
    answer = server.post("/generate", body)
    assert answer.status == 200, answer.body
    return [answer.json()["output_ids"], answer.json()["meta_info"]["exit_depths"]]


def empty(server: Server) -> None:
    info = wait_idle(server)
    assert info["free_slots"] + info["cached_slots"] == info["num_slots"]
    assert info["evictable_slots"] == info["cached_slots"]
    assert info["reserved_slots"] == 0
    assert info["free_rows"] == info["rows"]
    assert info["requests"] == info["refused"] + sum(info["finished"].values())
    assert server.get("/flush_cache").status == 200
    assert state(server)["free_slots"] == info["num_slots"]


@pytest.fixture(scope="module", params=["last_exited", "shared"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = rand_checkpoint(tmp_path_factory.mktemp("rand"), hidden=32, intermediate=32, layers=1)
    flags = ["--num-slots", str(NUM_SLOTS), "--chunked-prefill-size", "48", "--rounds-in-flight", "3"]
    flags += ["--debug-poison-slots", "--kv-layout", request.param]
    with running_server(folder, *flags) as running:
        yield running


def test_everybody_is_answered_once_and_nothing_is_left(server: Server) -> None:
    assert state(server)["num_slots"] == NUM_SLOTS
    empty(server)
    pids, before = family(server.process.pid), capacity(server)
    begin = time.monotonic()
    tally = asyncio.run(storm(server, seed=5))
    print(f"{REQUESTS} requests in {time.monotonic() - begin:.1f} s: {tally}")
    empty(server)
    assert capacity(server) == before
    assert family(server.process.pid) == pids
    assert server.get("/health").status == 200
    assert {"length", "stop", "abort"} <= tally.reasons.keys()
    assert tally.left > REQUESTS // 10
    assert tally.refused > REQUESTS // 100
    assert "Traceback" not in server.log()
    assert "ERROR" not in server.log()
