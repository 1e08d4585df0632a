"""Drives a :class:`Worker` without a scheduler: random but legal plans from a seed.

Rows, slots, chunk borders, grant sizes, arrival times, neighbours' aborts and the number of steps
between plans are all drawn from one random generator, so a property test can ask for "any
schedule" by asking for any seed. Slots come in random order from a free list and go back when the
worker's events show that nothing can touch them.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ouro_sgl.messages import (
    Admit,
    Chunk,
    ChunkLogprobs,
    ExitMode,
    FinishReason,
    Grant,
    Release,
    RoundEvents,
    RowParams,
    Segment,
    StepPlan,
    TopLogprobs,
)
from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import Weights, load_lookahead_head, load_weights, random_lookahead_head
from ouro_sgl.worker.executor import TorchExecutor
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.worker import Worker, WorkerSettings


@dataclass
class Request:
    input_ids: list[int]
    params: RowParams
    prompt_logprob_start: int | None = None
    abort_after: int | None = None  # release the row once it has produced so many tokens
    grammar: str | None = None  # of a constrained request; a driver has none to offer
    forced_ids: list[int] = field(default_factory=list)  # outputs to replay
    forced_depths: list[int] = field(default_factory=list)


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    lambdas: list[list[float]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    prompt_tops: dict[int, TopLogprobs] = field(default_factory=dict)  # by position, as prompt_logprobs
    reason: FinishReason = FinishReason.NONE

    def comparable(self) -> tuple[object, ...]:
        """What must be bit-identical in any company."""
        all_tops = [*self.tops, *(top for _, top in sorted(self.prompt_tops.items()))]
        tops = [(top.top_values, top.top_ids, top.id_values) for top in all_tops]
        return (
            self.token_ids,
            self.exit_depths,
            self.logprobs,
            tops,
            self.lambdas,
            sorted(self.prompt_logprobs.items()),
            self.reason,
        )


@dataclass
class Placed:
    """A request on a row."""

    index: int
    epoch: int
    cached: int
    prefilled: int
    table: list[list[int]]  # slots of each position, by depth
    owned: list[int]
    last_chunk: int = 0
    granted_until: int = 0
    release_plan: int | None = None


class Model:
    """A checkpoint folder loaded once, for any number of workers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.config: OuroConfig = load_config(folder)
        self.weights: Weights = load_weights(folder, self.config, dtype, device)
        self.model = OuroModel(self.config, self.weights)
        self.lookahead = load_lookahead_head(folder, self.config.hidden_size)
        self.dtype = dtype

    def worker(self, num_slots: int, settings: WorkerSettings) -> Worker:
        heads = {ExitMode.RANDOM_LOOKAHEAD: random_lookahead_head(0, self.config.hidden_size)}
        if self.lookahead is not None:
            heads[ExitMode.LOOKAHEAD] = self.lookahead
        pool = KVPool(self.config, num_slots, self.dtype, self.model.device, poison=True)
        rows = Rows(
            settings.max_rows,
            settings.max_length,
            self.config.total_loops,
            self.config.vocab_size,
            self.config.hidden_size,
            self.dtype,
            self.model.device,
        )
        executor = TorchExecutor(self.model, rows, pool, heads, settings.min_coda_batch_size)
        return Worker(rows, pool, executor, settings)


class Driver:
    """Runs requests to their ends; ``seed`` fixes the schedule."""

    def __init__(
        self,
        worker: Worker,
        settings: WorkerSettings,
        total_loops: int,
        num_slots: int,
        seed: int,
        *,
        max_chunk: int = 64,
        reuse_prefixes: bool = False,
        eager: bool = False,
    ) -> None:
        self.worker, self.settings, self.total_loops = worker, settings, total_loops
        self.random = random.Random(seed)
        self.max_chunk = max_chunk
        self.reuse_prefixes = reuse_prefixes
        self.eager = eager  # everything arrives at once
        self.free: list[int] = torch.randperm(
            num_slots, generator=torch.Generator().manual_seed(seed)
        ).tolist()
        self.rows: dict[int, Placed] = {}
        self.kept: list[tuple[list[int], list[list[int]]]] = []  # (prompt, table) of finished prefills
        self.kept_slots: set[int] = set()
        self.plan_id = self.chunk_id = self.epoch = 0
        self.hits: list[int] = []  # cached tokens of each admission that had any
        self.results: list[Result] = []

    def run(self, requests: list[Request]) -> list[Result]:
        self.results = [Result() for _ in requests]
        waiting = list(range(len(requests)))
        self.random.shuffle(waiting)
        deadline = time.monotonic() + 500
        while time.monotonic() < deadline:
            if not waiting and not self.rows:
                assert self.worker.idle or self._drain(requests)
                return self.results
            plan = StepPlan(self.plan_id + 1)
            while waiting and len(self.rows) < self.settings.max_rows and self._chance(0.5):
                if not self._admit(plan, requests, waiting[0]):
                    break
                waiting.pop(0)
            self._release(plan, requests)
            self._grant(plan, requests)
            self._chunk(plan, requests)
            if plan.admits or plan.grants or plan.chunks or plan.releases:
                self.plan_id += 1
                self.worker.apply(plan)
            for _ in range(self.random.randint(1, 4)):
                events = self.worker.step()
                if events is not None:
                    self._take(events, requests)
        raise AssertionError("the worker makes no progress")

    def _chance(self, probability: float) -> bool:
        return self.eager or self.random.random() < probability

    def _drain(self, requests: list[Request]) -> bool:
        """Whether the worker comes to rest: rounds launched ahead may still run on a device."""
        deadline = time.monotonic() + 60
        while not self.worker.idle and time.monotonic() < deadline:
            events = self.worker.step()
            if events is not None:
                self._take(events, requests)
        return self.worker.idle

    def _width(self, request: Request, position: int) -> int:
        if self.settings.shared_layout:
            return 1
        output = position - len(request.input_ids) + 1
        if output < len(request.forced_depths):
            return request.forced_depths[output]
        if request.params.exit_trace is not None:
            return request.params.exit_trace[output]
        return request.params.max_loops

    def _need(self, request: Request) -> int:
        length = len(request.input_ids)
        return self.total_loops * (length + request.params.max_new_tokens)

    def _admit(self, plan: StepPlan, requests: list[Request], index: int) -> bool:
        request = requests[index]
        if self._need(request) > len(self.free):
            assert self.rows or self.kept, "the pool is too small for one request"
            if not self.rows:
                self.kept.clear()
                self.free.extend(sorted(self.kept_slots))
                self.kept_slots.clear()
            return False
        row = self.random.choice([row for row in range(self.settings.max_rows) if row not in self.rows])
        self.epoch += 1
        table = self._cached(request)
        if table:
            self.hits.append(len(table))
        placed = Placed(index, self.epoch, len(table), len(table), table, [])
        placed.granted_until = len(request.input_ids)
        self.rows[row] = placed
        columns = [slots[depth] for depth in range(self.total_loops) for slots in table]
        plan.admits.append(
            Admit(
                row,
                self.epoch,
                request.input_ids,
                request.params,
                len(table),
                columns,
                request.prompt_logprob_start,
                request.forced_ids,
                request.forced_depths,
            )
        )
        return True

    def _cached(self, request: Request) -> list[list[int]]:
        if not self.reuse_prefixes:
            return []
        limit = len(request.input_ids) - 1
        if request.prompt_logprob_start is not None:
            limit = max(0, min(limit, request.prompt_logprob_start - 1))
        best: list[list[int]] = []
        for prompt, table in self.kept:
            same = 0
            while same < min(limit, len(prompt)) and prompt[same] == request.input_ids[same]:
                same += 1
            if same > len(best):
                best = table[:same]
        return [list(slots) for slots in best[: self.random.randint(0, len(best))]]

    def _take_slots(self, placed: Placed, count: int) -> list[int]:
        slots = [self.free.pop() for _ in range(count)]
        placed.owned.extend(slots)
        return slots

    def _chunk(self, plan: StepPlan, requests: list[Request]) -> None:
        if not self._chance(0.8):
            return
        budget, segments = self.random.randint(1, self.max_chunk), []
        for row, placed in self.rows.items():
            length = len(requests[placed.index].input_ids)
            if placed.prefilled >= length or placed.release_plan is not None or not budget:
                continue
            count = min(budget, length - placed.prefilled)
            budget -= count
            columns = [self._take_slots(placed, self.total_loops) for _ in range(count)]
            placed.table.extend(columns)
            flat = [slots[depth] for depth in range(self.total_loops) for slots in columns]
            start = placed.prefilled
            segments.append(Segment(row, placed.epoch, start, start + count, flat))
            placed.prefilled += count
            placed.last_chunk = self.chunk_id + 1
        if segments:
            self.chunk_id += 1
            plan.chunks.append(Chunk(self.chunk_id, segments))

    def _grant(self, plan: StepPlan, requests: list[Request]) -> None:
        for row, placed in self.rows.items():
            request = requests[placed.index]
            end = len(request.input_ids) + request.params.max_new_tokens - 1
            if placed.release_plan is not None or placed.granted_until >= end or not self._chance(0.6):
                continue
            until = end if self.eager else min(end, placed.granted_until + self.random.randint(1, 6))
            widths = [self._width(request, position) for position in range(placed.granted_until, until)]
            slots = self._take_slots(placed, sum(widths))
            plan.grants.append(Grant(row, placed.epoch, placed.granted_until, widths, slots))
            placed.granted_until = until

    def _release(self, plan: StepPlan, requests: list[Request]) -> None:
        for row, placed in self.rows.items():
            limit = requests[placed.index].abort_after
            produced = len(self.results[placed.index].token_ids)
            admitted_now = any(admit.row == row for admit in plan.admits)  # a plan releases before it admits
            if placed.release_plan is None and limit is not None and produced >= limit and not admitted_now:
                plan.releases.append(Release(row, placed.epoch))
                placed.release_plan = plan.plan_id

    def _take(self, events: RoundEvents, requests: list[Request]) -> None:
        for chunk in events.chunk_logprobs:
            self._take_prompt_logprobs(chunk)
        for event, (row, epoch) in enumerate(zip(events.rows, events.epochs, strict=True)):
            placed = self.rows.get(row)
            if placed is None or placed.epoch != epoch or placed.release_plan is not None:
                continue
            result = self.results[placed.index]
            expected = len(requests[placed.index].input_ids) + len(result.token_ids) - 1
            assert events.positions[event] == expected, "an event is missing or out of order"
            result.token_ids.append(events.token_ids[event])
            result.exit_depths.append(events.exit_depths[event])
            if event in events.logprobs:
                result.logprobs.append(events.logprobs[event])
            if event in events.exit_lambdas:
                result.lambdas.append(events.exit_lambdas[event])
            if event in events.tops:
                result.tops.append(events.tops[event])
            if events.reasons[event]:
                self._end(row, events.reasons[event], requests)
        for row, placed in list(self.rows.items()):
            request = requests[placed.index]
            retired = events.retired_chunk >= placed.last_chunk
            if placed.release_plan is not None:
                if retired and events.applied_plan >= placed.release_plan:
                    self._end(row, FinishReason.ABORT, requests)
            elif (
                retired and placed.prefilled == len(request.input_ids) and request.params.max_new_tokens == 0
            ):
                self._end(row, FinishReason.LENGTH, requests)

    def _take_prompt_logprobs(self, chunk: ChunkLogprobs) -> None:
        placed = self.rows.get(chunk.row)
        if placed is not None and placed.epoch == chunk.epoch:
            result = self.results[placed.index]
            positions = range(chunk.start, chunk.start + len(chunk.values))
            result.prompt_logprobs.update(zip(positions, chunk.values, strict=True))
            if chunk.tops:
                result.prompt_tops.update(zip(positions, chunk.tops, strict=True))

    def _end(self, row: int, reason: FinishReason, requests: list[Request]) -> None:
        placed = self.rows.pop(row)
        self.results[placed.index].reason = reason
        kept: set[int] = set()
        if self.reuse_prefixes and reason != FinishReason.ABORT:
            prompt = requests[placed.index].input_ids
            self.kept.append((prompt, placed.table[: len(prompt)]))
            kept = {slot for slots in placed.table[: len(prompt)] for slot in slots}
            self.kept_slots |= kept
        freed = [slot for slot in placed.owned if slot not in kept]
        self.random.shuffle(freed)
        self.free.extend(freed)


def retracted(request: Request, result: Result, rng: random.Random) -> Request:
    """``request`` as it comes back from a retraction at some time before its end, which is ``result``."""
    count = rng.randint(0, max(len(result.token_ids) - 1, 0))
    return replace(request, forced_ids=result.token_ids[:count], forced_depths=result.exit_depths[:count])


def run(
    model: Model,
    requests: list[Request],
    settings: WorkerSettings,
    seed: int = 0,
    *,
    num_slots: int = 8192,
    max_chunk: int = 64,
    reuse_prefixes: bool = False,
    eager: bool = False,
) -> list[Result]:
    """All requests on a fresh worker, on the schedule of ``seed``."""
    worker = model.worker(num_slots, settings)
    driver = Driver(
        worker,
        settings,
        model.config.total_loops,
        num_slots,
        seed,
        max_chunk=max_chunk,
        reuse_prefixes=reuse_prefixes,
        eager=eager,
    )
    return driver.run(requests)
