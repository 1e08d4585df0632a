"""The real scheduler and the real worker in one process, with random delays where sockets would be.

Every message is encoded and decoded on its way, as on a socket. Arrival times, delays, the order of
turns and aborts are drawn from one random generator: a seed names a schedule. The scheduler's books
are checked after every one of its steps.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import msgspec

from ouro_sgl.messages import (
    ControlOp,
    ControlReq,
    FinishReason,
    FrontendMessage,
    GenerateReq,
    PlanMessage,
    RoundEvents,
    SchedulerMessage,
    StepPlan,
    TokenBatch,
    WorkerMessage,
)
from ouro_sgl.scheduler.config import SchedulerConfig
from ouro_sgl.scheduler.scheduler import Scheduler
from ouro_sgl.worker.worker import WorkerSettings
from tests.utils_scheduler import FakeGrammars
from tests.worker_driver import Model, Request, Result

_encoder = msgspec.msgpack.Encoder()


def over_the_wire(message: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(_encoder.encode(message), type=kind)


class Pair:
    """One scheduler over one worker. Keywords are those of :class:`SchedulerConfig`."""

    def __init__(
        self,
        model: Model,
        *,
        seed: int = 0,
        max_length: int = 256,
        min_coda_batch_size: int = 1,
        prefills_between_rounds: int = 1,
        **settings: Any,
    ) -> None:
        self.config = SchedulerConfig(
            total_loops=model.config.total_loops,
            max_chunks_ahead=prefills_between_rounds + 1,
            radix_cache=settings.pop("radix_cache", True) and settings.get("kv_layout") != "shared",
            **settings,
        )
        self.random = random.Random(seed)
        self.grammars = FakeGrammars(self.random, model.config.vocab_size)
        self.scheduler = Scheduler(self.config, self.grammars)
        self.worker = model.worker(
            self.config.num_slots,
            WorkerSettings(
                max_rows=self.config.max_rows,
                max_length=max_length,
                rounds_in_flight=self.config.rounds_in_flight,
                shared_layout=self.config.kv_layout == "shared",
                min_coda_batch_size=min_coda_batch_size,
                max_prefill_batches_before_decode=prefills_between_rounds,
            ),
        )
        self.plans: deque[StepPlan] = deque()
        self.events: deque[RoundEvents] = deque()
        self.results: dict[int, Result] = {}
        self.cached_tokens: dict[int, int] = {}
        self.retractions: dict[int, int] = {}
        self.replayed_tokens = 0
        self._heard = 0  # output tokens
        self._requests: dict[int, Request] = {}
        self._uids = 0

    def run(self, requests: list[Request], *, at_once: bool = False, retract_every: int = 0) -> list[Result]:
        """Serve ``requests`` to their ends, which leaves nothing behind; results in their order.

        Args:
            at_once: all arrive before anything runs, in their order; else at random times.
            retract_every: everything is retracted when about so many tokens are new; 0: never. That
                needs progress, so it comes to an end, and happens in all parts of any schedule.
        """
        first = self._uids
        waiting = deque(enumerate(requests, first))
        self._uids += len(requests)
        if not at_once:
            shuffled = list(waiting)
            self.random.shuffle(shuffled)
            waiting = deque(shuffled)
        deadline = time.monotonic() + 500.0
        retract_at = self.random.randint(0, 2 * retract_every) if retract_every else 0
        while waiting or not self._quiet():
            assert time.monotonic() < deadline, f"no progress: {self.scheduler.info()}"
            while waiting and (at_once or self.random.random() < 0.3):
                self._submit(*waiting.popleft())
            self._turn()
            if retract_every and self._heard >= retract_at:
                self._retract()
                retract_at = self._heard + self.random.randint(1, 2 * retract_every)
        self.check_end()
        return [self.results[uid] for uid in range(first, self._uids)]

    def _retract(self) -> None:
        """Everything leaves its row; time may pass before it may go on, and then it may happen again."""
        while True:
            self.scheduler.control(ControlReq(0, ControlOp.PAUSE, {"mode": "retract"}), 0.0)
            for _ in range(self.random.choice([0, 3, 30])):
                self._turn()
            self.scheduler.control(ControlReq(0, ControlOp.CONTINUE), 0.0)
            if self.random.random() < 0.6:
                return
            for _ in range(self.random.randrange(60)):
                self._turn()

    def _submit(self, uid: int, request: Request) -> None:
        self.results[uid] = Result()
        self._requests[uid] = request
        message = GenerateReq(
            uid,
            request.input_ids,
            request.params,
            prompt_logprob_start=request.prompt_logprob_start,
            grammar=request.grammar,
        )
        self.scheduler.add(over_the_wire(message, FrontendMessage))

    def _quiet(self) -> bool:
        return self.scheduler.idle and not self.plans and not self.events and self.worker.idle

    def _turn(self) -> None:
        """The worker takes a turn, or the scheduler, or both."""
        if self.random.random() < 0.7:
            while self.plans and self.random.random() < 0.8:
                self.worker.apply(over_the_wire(self.plans.popleft(), PlanMessage))
            events = self.worker.step()
            if events is not None:
                self.events.append(over_the_wire(events, WorkerMessage))
        if self.random.random() < 0.5:
            while self.events and self.random.random() < 0.9:
                self.scheduler.process_events(self.events.popleft())
            self._abort()
            plan = self.scheduler.step()
            if plan is not None:
                self.plans.append(plan)
                self.replayed_tokens += sum(len(admit.forced_ids) for admit in plan.admits)
            output = self.scheduler.take_output()
            if output is not None:
                self._hear(over_the_wire(output, SchedulerMessage))
            self.scheduler.check_integrity()

    def _abort(self) -> None:
        for uid in list(self.scheduler.requests):
            limit = self._requests[uid].abort_after
            if limit is not None and len(self.results[uid].token_ids) >= limit and self.random.random() < 0.5:
                self.scheduler.abort([uid])

    def _hear(self, batch: TokenBatch) -> None:
        for started in batch.started:
            assert started.uid not in self.cached_tokens, f"a second start of request {started.uid}"
            self.cached_tokens[started.uid] = started.cached_tokens
            found = started.prompt_logprobs
            if found is not None:
                values = enumerate(found.values, found.start)
                self.results[started.uid].prompt_logprobs = {p: v for p, v in values if v is not None}
        at = 0
        for uid, count in zip(batch.uids, batch.counts, strict=True):
            result = self.results[uid]
            self._heard += count
            result.token_ids += batch.token_ids[at : at + count]
            result.exit_depths += batch.exit_depths[at : at + count]
            at += count
            if uid in batch.logprobs:
                result.logprobs += batch.logprobs[uid].values
                result.tops += batch.logprobs[uid].tops
            result.lambdas += batch.exit_lambdas.get(uid, [])
        for finished in batch.finished:
            result = self.results[finished.uid]
            assert result.reason is FinishReason.NONE, f"a second end of request {finished.uid}"
            assert finished.reason, finished
            assert finished.status is None, finished
            assert finished.num_tokens == len(result.token_ids)
            result.reason = finished.reason
            self.retractions[finished.uid] = finished.num_retractions

    def check_end(self) -> None:
        """Everybody was answered; every slot is free or cached, and nothing is promised."""
        assert all(result.reason for result in self.results.values())
        pool = self.scheduler.pool
        self.scheduler.check_integrity()
        assert len(pool.allocator) + pool.radix.cached == self.config.num_slots
        assert pool.radix.evictable == pool.radix.cached
        assert pool.reserved == 0
