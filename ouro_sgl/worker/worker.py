"""The worker without its sockets: applies plans, launches chunks and rounds, reads what retired.

``apply`` and ``step`` never wait for anything. Launched work stands in queues until it is read; at
most ``rounds_in_flight`` rounds are launched and not yet read (1 is synchronous). On the CPU a launch
computes at once, and only its reading is late: the order of effects is the same as on a device that
runs behind the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ouro_sgl.errors import ConfigError
from ouro_sgl.messages import (
    Admit,
    Chunk,
    RoundEvents,
    Segment,
    StepPlan,
    UpdateWeights,
    WeightsUpdated,
)
from ouro_sgl.worker.executor import Computed, Executor, Pending
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.prefill import ChunkResult, Prompt
from ouro_sgl.worker.round import RoundBlock
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish

LONG_CHUNK = 1024  # tokens; rounds are held back behind chunks of at least so many


@dataclass(frozen=True)
class WorkerSettings:
    """What the worker needs of the server's settings, resolved."""

    max_rows: int
    max_length: int  # positions per request
    rounds_in_flight: int = 1
    shared_layout: bool = False
    min_coda_batch_size: int = 1
    max_prefill_batches_before_decode: int = 1


@dataclass(frozen=True)
class LaunchedRound:
    """A round that was not yet read."""

    work: Pending[RoundBlock]
    applied_plan: int  # the newest plan applied before it
    wakes: int  # how many plans and activations came before it


class Worker:
    """One model, its slots and its rows.

    ``between_layers`` is called while a chunk's launches take host time; the process sets it to its
    own turn, so that rounds go on, events leave and plans are applied meanwhile. ``launching_chunk`` is
    true then: some layers of a chunk are launched and some are not.
    """

    def __init__(self, rows: Rows, pool: KVPool, executor: Executor, settings: WorkerSettings) -> None:
        self.rows = rows
        self.between_layers: Callable[[], None] = lambda: None
        self._pool = pool
        self._executor = executor
        self._settings = settings
        self._prompts: dict[int, Prompt] = {}  # rows in prefill or running
        self._wishes: dict[int, LogprobWish] = {}  # rows that want log-probabilities of output tokens
        self._chunks: deque[Chunk] = deque()
        self.launching_chunk = False
        # Rounds and chunks each retire in launch order; with two streams not in a common one.
        self._launched_chunks: deque[Pending[ChunkResult]] = deque()
        self._launched_rounds: deque[LaunchedRound] = deque()
        self._running: set[int] = set()  # activated, end not yet seen
        # A round that found nothing to do stops the launching until the next wake: a plan or an
        # activation that came after that round was launched.
        self._runnable = False
        self._wakes = 0
        self._chunks_since_round = 0
        self._rounds_since_chunk = 0
        self._long_chunk = False  # the newest chunk is one
        self._applied_plan = 0
        self._reported_plan = 0
        self._retired_round = 0
        self._retired_chunk = 0

    @property
    def idle(self) -> bool:
        """Nothing to launch and nothing to read: only a plan can change that."""
        return (
            not self._chunks
            and not self._launched_chunks
            and not self._launched_rounds
            and not (self._running and self._runnable)
            and self._reported_plan == self._applied_plan
        )

    @torch.inference_mode()
    def apply(self, plan: StepPlan) -> None:
        """Apply one plan between two rounds.

        Raises:
            ValueError: the plan is not the next one.
        """
        if plan.plan_id != self._applied_plan + 1:
            raise ValueError(f"plan {plan.plan_id} follows plan {self._applied_plan}")
        with self._executor.decoding():
            self._apply_rows(plan)
        with self._executor.prefilling():
            for chunk in plan.chunks:
                for segment in chunk.segments:
                    self._place(segment)
        self._chunks.extend(plan.chunks)
        self._applied_plan = plan.plan_id
        self._wake()

    def _apply_rows(self, plan: StepPlan) -> None:
        for release in plan.releases:
            prompt = self._prompts.get(release.row)
            if prompt is not None and prompt.epoch == release.epoch:
                self.rows.end(release.row)
                self._forget(release.row)
        for admit in plan.admits:
            self._admit(admit)
        grants = [grant for grant in plan.grants if self._has(grant.row, grant.epoch)]
        if grants:
            self._pool.handed_out([slot for grant in grants for slot in grant.slots])
            self.rows.grant(grants)
        for mask in plan.masks:
            if self._has(mask.row, mask.epoch):
                self.rows.set_mask(mask)

    @torch.inference_mode()
    def update_weights(self, message: UpdateWeights) -> WeightsUpdated:
        """Load other weights; takes as long as that. Rows that run go on with them."""
        folder = Path(message.model_path)
        try:
            self._executor.update_weights(folder)
        except ConfigError as error:
            return WeightsUpdated(False, str(error))
        return WeightsUpdated(True, f"the weights of {folder} are loaded")

    def _wake(self) -> None:
        self._wakes += 1
        self._runnable = True

    def _has(self, row: int, epoch: int) -> bool:
        """Whether the row still is that admission's, as far as the host knows."""
        prompt = self._prompts.get(row)
        return prompt is not None and prompt.epoch == epoch

    def _admit(self, admit: Admit) -> None:
        params = admit.params
        self._forget(admit.row)
        self.rows.admit(admit)
        wish = LogprobWish(params.top_logprobs_num, tuple(params.token_ids_logprob))
        with self._executor.prefilling():
            token_ids = self.rows.upload(admit.input_ids, torch.int64)
            if admit.cached_len:
                self.rows.set_prompt_slots(admit.row, 0, admit.cached_slots)
        self._prompts[admit.row] = Prompt(
            admit.row,
            admit.epoch,
            token_ids,
            params.max_new_tokens,
            admit.prompt_logprob_start,
            wish,
            params.exit_lambdas,
        )
        if params.logprobs:
            self._wishes[admit.row] = wish

    def _place(self, segment: Segment) -> None:
        if not self._has(segment.row, segment.epoch):
            return
        self._pool.handed_out(segment.slots)
        self.rows.set_prompt_slots(segment.row, segment.start, segment.slots)

    def _forget(self, row: int) -> None:
        self._prompts.pop(row, None)
        self._wishes.pop(row, None)
        self._running.discard(row)

    @torch.inference_mode()
    def step(self) -> RoundEvents | None:
        """Launch what may be launched, read at most one result; None if nothing is to report."""
        self._launch()
        if self._launched_chunks and self._launched_chunks[0].done():
            return self._read_chunk(self._launched_chunks.popleft().result())
        if self._launched_rounds and not self._may_launch_round():
            if self._launched_rounds[0].work.done():
                return self._read_round(self._launched_rounds.popleft())
            return None
        if not self._launched_rounds and self._reported_plan < self._applied_plan:
            return self._events()
        return None

    def _launch(self) -> None:
        decodes = self._may_launch_round()
        limit = self._settings.max_prefill_batches_before_decode
        may_prefill = self._chunks and not self.launching_chunk
        if may_prefill and (not decodes or self._chunks_since_round < limit):
            self._chunks_since_round += 1
            self._launch_chunk(self._chunks.popleft())
        elif decodes:
            self._chunks_since_round = 0
            self._rounds_since_chunk += 1
            work = self._executor.launch_round(len(self._running), self._wishes)
            self._launched_rounds.append(LaunchedRound(work, self._applied_plan, self._wakes))

    def _may_launch_round(self) -> bool:
        room = len(self._launched_rounds) < self._settings.rounds_in_flight
        return room and self._runnable and bool(self._running) and not self._must_wait()

    def _must_wait(self) -> bool:
        """Whether rounds must wait until the chunk under way ends, where both share a stream.

        While a long chunk is under way they have T turns at most, a whole token, and none between its
        layers: more would mostly read weights for the rows that decode, while the others wait for their
        prompts. Where so many rounds wait that none may be launched, the next chunk goes behind them.
        """
        if not (self._executor.one_stream and self._long_chunk):
            return False
        if self.launching_chunk:
            return True
        return bool(self._launched_chunks) and self._rounds_since_chunk >= self.rows.total_loops

    def _launch_chunk(self, chunk: Chunk) -> None:
        """Segments of rows that were released meanwhile are left out; their slots are not in use yet."""
        segments = [segment for segment in chunk.segments if self._has(segment.row, segment.epoch)]
        if not segments:
            self._launched_chunks.append(Computed(ChunkResult(chunk.chunk_id)))
            return
        self.launching_chunk = True
        self._rounds_since_chunk = 0
        self._long_chunk = sum(segment.end - segment.start for segment in segments) >= LONG_CHUNK
        try:
            work = self._executor.launch_chunk(
                Chunk(chunk.chunk_id, segments), self._prompts, self.between_layers
            )
        finally:
            self.launching_chunk = False
        self._launched_chunks.append(work)

    def _read_chunk(self, result: ChunkResult) -> RoundEvents:
        self._retired_chunk = result.chunk_id
        with self._executor.decoding():
            self._activate(result)
        events = self._events()
        events.chunk_logprobs = result.logprobs
        return events

    def _read_round(self, launched: LaunchedRound) -> RoundEvents:
        result = launched.work.result()
        self._retired_round += 1
        if result.idle and launched.wakes == self._wakes:
            self._runnable = False
        for row, epoch, reason in zip(result.rows, result.epochs, result.reasons, strict=True):
            if reason and self._has(row, epoch):
                self._forget(row)
        events = self._events(launched.applied_plan)
        events.rows, events.epochs, events.positions = result.rows, result.epochs, result.positions
        events.token_ids, events.exit_depths = result.token_ids, result.exit_depths
        events.reasons, events.logprobs, events.tops = result.reasons, result.logprobs, result.tops
        events.exit_lambdas = result.exit_lambdas
        events.round_stats = {"rounds": 1, "lanes": result.lanes, "exits": result.exits}
        return events

    def _activate(self, result: ChunkResult) -> None:
        """The last chunk's end was seen: these rows decode from now on."""
        for row, hidden in result.final_hidden.items():
            prompt = self._prompts.get(row)
            if prompt is None:  # released while its chunk ran
                continue
            if prompt.max_new_tokens == 0:
                self.rows.end(row)
                self._forget(row)
                continue
            share = self._settings.shared_layout
            lambdas = result.lambdas.get(row)
            self.rows.activate(row, len(prompt.token_ids), hidden, share_last=share, lambdas=lambdas)
            self._running.add(row)
            self._wake()

    def _events(self, applied_plan: int = 0) -> RoundEvents:
        """``applied_plan``: that of a round which has just retired."""
        if not self._launched_rounds:
            applied_plan = self._applied_plan  # no launched round is left to wait for
        self._reported_plan = max(self._reported_plan, applied_plan)
        return RoundEvents(self._reported_plan, self._retired_round, self._retired_chunk)
