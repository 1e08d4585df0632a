"""The real scheduler and worker over a device on a virtual clock: does it ever wait, how full are rounds?

Times are those of an H200 at the 1.4B shape (``bench/LOG.md``); one token of a prompt stands for 1024, so
that the script model of the CPU can compute the answers. Nothing here measures time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ouro_sgl.messages import Chunk, GenerateReq, RoundEvents, RowParams, StepPlan
from ouro_sgl.worker.executor import Executor, Pending
from ouro_sgl.worker.prefill import ChunkResult, Prompt
from ouro_sgl.worker.round import RoundBlock
from ouro_sgl.worker.sampler import LogprobWish
from tests.models import chain_of, script_checkpoint
from tests.pair import Pair
from tests.worker_driver import Model

OUTPUTS = 32
LOOPS = 4
LAUNCHES = 96  # layers of a chunk, all loops
# seconds: of the host between two turns, to launch a round, to begin a chunk, for one layer of one that is
# no graph; on the way of a message; until a client that was answered has asked again
TURN, LAUNCH_ROUND, BEGIN_CHUNK, LAUNCH_LAYER, MESSAGE, CLIENT = 15e-6, 60e-6, 2e-3, 400e-6, 2e-4, 2e-3


@dataclass
class Clock:
    now: float = 0.0
    free: float = 0.0  # when the device has done all that was launched
    busy: float = 0.0  # of the device, so far

    def run(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds
        self.busy += seconds


class Timed:
    """Work that was computed at its launch, and is done when the clock says so."""

    def __init__(self, value: Any, clock: Clock) -> None:
        self._value, self._clock, self._end = value, clock, clock.free

    def done(self) -> bool:
        return self._clock.now >= self._end

    def result(self) -> Any:
        return self._value


@dataclass
class VirtualExecutor:
    """One stream. A round takes a fixed time and some for each row, a chunk some for each token."""

    inner: Executor
    clock: Clock
    per_row: float
    per_token: float
    graphs: bool  # a chunk is launched at once, not layer by layer
    fixed: float = 1.1e-3
    lanes: list[int] = field(default_factory=list)  # of each round that had some
    one_stream: bool = True

    def launch_round(self, running: int, wishes: dict[int, LogprobWish]) -> Pending[RoundBlock]:
        block = self.inner.launch_round(running, wishes).result()
        self.clock.now += LAUNCH_ROUND
        if block.lanes:
            self.lanes.append(block.lanes)
            self.clock.run(self.fixed + self.per_row * block.lanes)
        return Timed(block, self.clock)

    def launch_chunk(
        self, chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None]
    ) -> Pending[ChunkResult]:
        tokens = sum(segment.end - segment.start for segment in chunk.segments)
        self.clock.now += BEGIN_CHUNK
        if self.graphs:
            self.clock.run(tokens * self.per_token)
        for _ in range(0 if self.graphs else LAUNCHES):
            self.clock.now += LAUNCH_LAYER
            self.clock.run(tokens * self.per_token / LAUNCHES)
            between_layers()
        return Timed(self.inner.launch_chunk(chunk, prompts, lambda: None).result(), self.clock)

    def update_weights(self, folder: Path) -> None:
        self.inner.update_weights(folder)

    def decoding(self) -> AbstractContextManager[object]:
        return self.inner.decoding()

    prefilling = decoding


@dataclass
class Served:
    seconds: float
    busy: float  # share of the time
    lanes: list[int]
    gaps: list[float]  # seconds between a request's tokens


def serve(
    model: Model, concurrency: int, prompt: int, per_row: float, per_token: float, *, graphs: bool
) -> Served:
    """Twice as many requests as clients, each client asks again once it is answered."""
    pair = Pair(
        model,
        num_slots=LOOPS * (prompt + OUTPUTS) * concurrency,
        max_rows=concurrency,
        max_length=prompt + OUTPUTS,
        rounds_in_flight=4,
        chunked_prefill_size=4,
        radix_cache=False,
    )
    clock = Clock()
    device = VirtualExecutor(pair.worker._executor, clock, per_row, per_token, graphs)
    pair.worker._executor = device
    waiting = deque(range(2 * concurrency))
    arrivals: list[tuple[float, int]] = []
    plans: deque[tuple[float, StepPlan]] = deque()
    events: deque[tuple[float, RoundEvents]] = deque()
    heard: dict[int, list[float]] = {uid: [] for uid in waiting}
    answered = 0

    def ask(when: float) -> None:
        heapq.heappush(arrivals, (when, waiting.popleft()))

    def turn() -> None:
        nonlocal answered
        clock.now += TURN
        while plans and plans[0][0] <= clock.now:
            pair.worker.apply(plans.popleft()[1])
        report = pair.worker.step()
        if report is not None:
            events.append((clock.now + MESSAGE, report))
        while arrivals and arrivals[0][0] <= clock.now:
            uid = heapq.heappop(arrivals)[1]
            params = RowParams(max_new_tokens=OUTPUTS, temperature=0.0)
            pair.scheduler.add(GenerateReq(uid, [10 + uid % 40] * prompt, params))
        while events and events[0][0] <= clock.now:
            pair.scheduler.process_events(events.popleft()[1])
        plan = pair.scheduler.step()
        if plan is not None:
            plans.append((clock.now + MESSAGE, plan))
        output = pair.scheduler.take_output()
        if output is None:
            return
        for uid, count in zip(output.uids, output.counts, strict=True):
            heard[uid] += [clock.now] * count
        for _ in output.finished:
            answered += 1
            if waiting:
                ask(clock.now + CLIENT)

    for number in range(concurrency):
        ask(number * MESSAGE)
    pair.worker.between_layers = turn
    with torch.inference_mode():
        while answered < 2 * concurrency:
            turn()
            assert clock.now < 60, pair.scheduler.info()
    gaps = [later - earlier for times in heard.values() for earlier, later in pairwise(times)]
    return Served(clock.now, clock.busy / clock.now, device.lanes, gaps)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    ring = {**chain_of([*range(10, 60)]), 59: 10}
    return Model(script_checkpoint(tmp_path_factory.mktemp("script"), ring), torch.float32)


@pytest.mark.parametrize(
    ("concurrency", "prompt", "per_row", "per_token", "graphs"),
    [
        pytest.param(32, 1, 51e-6, 20e-3, True, id="1024x32"),
        pytest.param(16, 4, 190e-6, 22e-3, True, id="4096x16"),
        pytest.param(4, 16, 740e-6, 30e-3, True, id="16384x4"),
        pytest.param(16, 4, 190e-6, 22e-3, False, id="4096x16, layer by layer"),
    ],
)
def test_the_device_never_waits_and_rounds_are_full(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
    prompt: int,
    per_row: float,
    per_token: float,
    graphs: bool,
) -> None:
    monkeypatch.setattr("ouro_sgl.worker.worker.LONG_CHUNK", 1)  # 1024, in tokens of this clock
    served = serve(model, concurrency, prompt, per_row, per_token, graphs=graphs)
    assert served.busy > 0.99
    assert sum(served.lanes) == 2 * concurrency * OUTPUTS * LOOPS - 2 * concurrency * LOOPS
    assert len(served.lanes) < 1.2 * 2 * (OUTPUTS - 1) * LOOPS  # of which all rows would need this many
    chunk, full_round = 4 * per_token, 1.1e-3 + per_row * concurrency
    assert max(served.gaps) < 2.5 * chunk  # rows that decode get a token for about every chunk
    prompts = 2 * concurrency * prompt * per_token
    assert served.seconds < 1.015 * (prompts + 2 * OUTPUTS * LOOPS * full_round)
