"""Scheduler and worker in one process, without sockets: for cases that need many settings of a server.

Both are the real ones. :class:`Runtime` plays the part of the sockets between them and of the
frontend that listens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ouro_sgl.messages import (
    Finished,
    FinishReason,
    GenerateReq,
    PromptLogprobs,
    RowParams,
    TokenBatch,
)
from ouro_sgl.scheduler.config import SchedulerConfig
from ouro_sgl.scheduler.grammar import NextTokens
from ouro_sgl.scheduler.scheduler import Scheduler
from ouro_sgl.worker.worker import Worker, WorkerSettings
from tests.worker_driver import Model

MAX_TURNS = 200_000  # of one run; far more than any case needs


class NoGrammars:
    """For requests without constraints."""

    def start(self, uid: int, source: str, end_ids: list[int]) -> None:
        raise AssertionError("no request here is constrained")

    def advance(self, uid: int, token_id: int) -> None:
        raise AssertionError("no request here is constrained")

    def forget(self, uid: int) -> None:
        raise AssertionError("no request here is constrained")

    def take(self) -> list[NextTokens]:
        return []


@dataclass
class Heard:
    """All that came back about one request."""

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finished: Finished | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.finished is not None
        return self.finished.cached_tokens

    def bits(self) -> tuple[list[int], list[int], list[float]]:
        """What must be the same in any company and under any setting."""
        return self.ids, self.depths, self.logprobs


class Runtime:
    """A scheduler and a worker.

    Args:
        model: the loaded checkpoint.
        num_slots: of the K/V pool.
        rows: requests that run at once.
        rounds_in_flight: 1 is synchronous.
        settings: other fields of :class:`SchedulerConfig`.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_slots: int = 8192,
        rows: int = 16,
        rounds_in_flight: int = 1,
        chunked_prefill_size: int = 512,
        **settings: object,
    ) -> None:
        loops = model.config.total_loops
        self.total_loops = loops
        shared = settings.get("kv_layout") == "shared"
        if shared:
            settings["radix_cache"] = False
        worker_settings = WorkerSettings(
            rows, min(model.config.max_position, num_slots // loops), rounds_in_flight, shared
        )
        self.worker: Worker = model.worker(num_slots, worker_settings)
        config = SchedulerConfig(
            loops,
            num_slots,
            rows,
            rounds_in_flight,
            chunked_prefill_size,
            **settings,  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(config, NoGrammars())
        self.heard: dict[int, Heard] = {}

    def submit(self, input_ids: list[int], **fields: object) -> int:
        """Queue a greedy request with log-probabilities; keywords are fields."""
        uid = len(self.heard) + 1
        self.heard[uid] = Heard()
        top = {name: fields.pop(name) for name in list(fields) if name in GenerateReq.__struct_fields__}
        params: dict[str, object] = {
            "max_new_tokens": 8,
            "temperature": 0.0,
            "logprobs": True,
            "max_loops": self.total_loops,
            **fields,
        }
        self.scheduler.add(GenerateReq(uid, input_ids, RowParams(**params), **top))  # type: ignore[arg-type]
        return uid

    def turn(self) -> None:
        """One iteration of the scheduler's loop and one of the worker's."""
        plan = self.scheduler.step()
        if plan is not None:
            self.worker.apply(plan)
        events = self.worker.step()
        if events is not None:
            self.scheduler.process_events(events)
        batch = self.scheduler.take_output()
        if batch is not None:
            self._hear(batch)

    def run(self) -> None:
        """Until every request has ended and every row is free; then the books must balance."""
        for _ in range(MAX_TURNS):
            if self.scheduler.idle and self.worker.idle:
                self.scheduler.check_integrity()
                return
            self.turn()
        raise AssertionError("the requests do not end")

    def answer(self, input_ids: list[int], **fields: object) -> Heard:
        """One request, alone."""
        uid = self.submit(input_ids, **fields)
        self.run()
        return self.heard[uid]

    def _hear(self, batch: TokenBatch) -> None:
        for started in batch.started:
            self.heard[started.uid].prompt_logprobs = started.prompt_logprobs
        at = 0
        for uid, count in zip(batch.uids, batch.counts, strict=True):
            heard = self.heard[uid]
            assert heard.finished is None, "tokens after the end"
            heard.ids += batch.token_ids[at : at + count]
            heard.depths += batch.exit_depths[at : at + count]
            if uid in batch.logprobs:
                heard.logprobs += batch.logprobs[uid].values
            at += count
        for finished in batch.finished:
            heard = self.heard[finished.uid]
            assert heard.finished is None, "a second end"
            heard.finished = finished
            assert finished.reason is FinishReason.ABORT or len(heard.ids) == finished.num_tokens
