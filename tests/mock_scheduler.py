"""A scheduler without a model, speaking the real messages over the real sockets.

It echoes: output token i is prompt token i modulo P, so a test writes the answer it wants into the
prompt. Exit depths are T for the first token, then 1, 2, 3, 4, 1, ... The log-probability of output i
is -(i + 1) / 8, of prompt position p it is -(p + 1) / 4. A request's ``extra_key`` may ask for trouble,
see :meth:`MockScheduler._admit`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from ouro_sgl.ipc import Edge, Receiver, Sender
from ouro_sgl.messages import (
    AbortReq,
    ControlOp,
    ControlReply,
    ControlReq,
    Finished,
    FinishReason,
    GenerateReq,
    OutputLogprobs,
    PromptLogprobs,
    SampleReq,
    SchedulerFailed,
    SchedulerReady,
    ShutdownReq,
    Started,
    StopReq,
    TokenBatch,
    TopLogprobs,
)

TOTAL_LOOPS = 4
SLOW_ROUND = 0.1  # seconds


def exit_depth(index: int) -> int:
    return TOTAL_LOOPS if index == 0 else (index - 1) % TOTAL_LOOPS + 1


class _Row:
    def __init__(self, request: GenerateReq) -> None:
        self.request = request
        self.sent = 0
        self.cut: int | None = None


class MockScheduler(threading.Thread):
    """Runs until a ShutdownReq arrives or :meth:`stop` is called.

    Args:
        ipc_dir: directory of the sockets.
        vocab_size, context_length, served_length: as in ``SchedulerReady``.
        round_seconds: time of one round; every running request gets ``tokens_per_round`` tokens.
        max_rows: more requests wait.
    """

    def __init__(
        self,
        ipc_dir: Path,
        vocab_size: int,
        context_length: int = 256,
        served_length: int | None = None,
        round_seconds: float = 0.001,
        tokens_per_round: int = 1,
        max_rows: int = 64,
        ready: bool = True,
    ) -> None:
        super().__init__(daemon=True)
        self.round_seconds = round_seconds
        self.tokens_per_round = tokens_per_round
        self.max_rows = max_rows
        self.received: list[Any] = []  # samples as the requests that they stand for
        self.samples = 0  # messages that were nothing but a sample
        self._first: GenerateReq | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._receiver: Receiver[Any] = Receiver(
            self._context, Edge.FRONTEND_TO_SCHEDULER, ipc_dir, bind=True
        )
        self._sender = Sender(self._context, Edge.SCHEDULER_TO_FRONTEND, ipc_dir, bind=True)
        self._facts = SchedulerReady(
            total_loops=TOTAL_LOOPS,
            vocab_size=vocab_size,
            context_length=context_length,
            served_length=served_length or context_length,
            num_slots=4096,
            max_rows=max_rows,
            has_lookahead=False,
            server_info={"device": "mock"},
        )
        self._announce = threading.Event()
        self._failure: str | None = None
        self._injected: list[Any] = []
        self._halt = threading.Event()
        self._waiting: list[_Row] = []
        self._running: dict[int, _Row] = {}
        if ready:
            self.announce()

    def announce(self) -> None:
        """Say that start-up is over."""
        self._announce.set()

    def break_down(self, message: str) -> None:
        self._failure = message

    def inject(self, message: Any) -> None:
        """Send ``message`` to the frontend with the next round."""
        self._injected.append(message)

    def stop(self) -> None:
        self._halt.set()
        self.join()

    def of_type(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def wait_for(self, kind: type, count: int, seconds: float = 100.0) -> None:
        """Until ``count`` messages of this kind have come.

        Raises:
            AssertionError: they do not come in time.
        """
        deadline = time.monotonic() + seconds
        while len(self.of_type(kind)) < count:
            assert time.monotonic() < deadline, f"{len(self.of_type(kind))} of {count} {kind.__name__} came"
            time.sleep(0.01)

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Rounds are slow during the block: 200 tokens take longer than it does on any machine."""
        usual, self.round_seconds = self.round_seconds, SLOW_ROUND
        try:
            yield
        finally:
            self.round_seconds = usual

    def run(self) -> None:
        try:
            self._loop()
        finally:
            self._receiver.close()
            self._sender.close()
            self._context.term()

    def _loop(self) -> None:
        announced = False
        while not self._halt.is_set():
            if self._announce.is_set() and not announced:
                announced = self._try_send(self._facts)
            if self._failure is not None:
                self._try_send(SchedulerFailed(self._failure))
                break
            if not self._take_messages():
                break
            self._round()
            if not self._running:
                self._receiver.socket.poll(2)
            else:
                time.sleep(self.round_seconds)

    def _try_send(self, message: Any) -> bool:
        """Whether ``message`` is on its way; it is not if the frontend is not there yet, or has left."""
        try:
            self._sender.send(message)
        except zmq.Again:
            return False
        return True

    def _take_messages(self) -> bool:
        for message in self._receiver.drain():
            if isinstance(message, SampleReq):
                assert self._first is not None
                self.samples += 1
                message = message.of(self._first)
            elif isinstance(message, GenerateReq):
                self._first = message
            self.received.append(message)
            if isinstance(message, GenerateReq):
                self._waiting.append(_Row(message))
            elif isinstance(message, AbortReq):
                self._abort(message.uids)
            elif isinstance(message, StopReq):
                if message.uid in self._running:
                    self._running[message.uid].cut = message.num_tokens
            elif isinstance(message, ControlReq):
                self._control(message)
            elif isinstance(message, ShutdownReq):
                return False
        return True

    def _control(self, message: ControlReq) -> None:
        rows = len(self._running) + len(self._waiting)
        if message.op == ControlOp.FLUSH_CACHE:
            reply = ControlReply(message.control_id, not rows, f"{rows} requests run" if rows else "")
        else:
            reply = ControlReply(
                message.control_id,
                True,
                info={
                    "waiting": len(self._waiting),
                    "prefilling": 0,
                    "running": len(self._running),
                    "num_slots": self._facts.num_slots,
                    "free_slots": self._facts.num_slots - 8 * rows,
                    "evictable_slots": 4 * rows,
                },
            )
        self._try_send(reply)

    def _abort(self, uids: list[int]) -> None:
        finished = []
        for uid in uids:
            row = self._running.pop(uid, None)
            text = "aborted"
            if row is None:
                row = next((row for row in self._waiting if row.request.uid == uid), None)
                if row is None:
                    continue
                self._waiting.remove(row)
                text = "aborted before prefill"
            finished.append(Finished(uid, FinishReason.ABORT, row.sent, message=text))
        if finished:
            self._try_send(TokenBatch(finished=finished))

    def _admit(self, batch: TokenBatch) -> None:
        while self._waiting and len(self._running) < self.max_rows:
            row = self._waiting.pop(0)
            request = row.request
            key = request.extra_key
            if key == "refuse":
                batch.finished.append(
                    Finished(request.uid, FinishReason.ERROR, 0, message="the queue is full", status=503)
                )
                continue
            if key == "break":
                batch.finished.append(Finished(request.uid, FinishReason.ERROR, 0, message="not finite"))
                continue
            cached = min(len(request.input_ids) - 1, 2)
            batch.started.append(Started(request.uid, cached, self._prompt_logprobs(request)))
            self._running[request.uid] = row

    def _prompt_logprobs(self, request: GenerateReq) -> PromptLogprobs | None:
        start = request.prompt_logprob_start
        if start is None:
            return None
        values = [None if p == 0 else -(p + 1) / 4 for p in range(start, len(request.input_ids))]
        tops = []
        if request.params.top_logprobs_num or request.params.token_ids_logprob:
            tops = [None if value is None else self._tops(request) for value in values]
        return PromptLogprobs(start, values, tops)

    def _tops(self, request: GenerateReq) -> TopLogprobs:
        params = request.params
        count = params.top_logprobs_num
        return TopLogprobs(
            [-0.5 - i for i in range(count)],
            list(range(count)),
            [float("-inf") for _ in params.token_ids_logprob],
        )

    def _round(self) -> None:
        while self._injected:
            self._try_send(self._injected.pop(0))
        batch = TokenBatch([], [], [], [], [], {}, [])
        self._admit(batch)
        for uid, row in list(self._running.items()):
            self._advance(uid, row, batch)
        if batch.started or batch.uids or batch.finished:
            self._try_send(batch)

    def _advance(self, uid: int, row: _Row, batch: TokenBatch) -> None:
        request, params = row.request, row.request.params
        reason, matched, new = FinishReason.NONE, None, 0
        if params.max_new_tokens == 0:
            reason = FinishReason.LENGTH
        while new < self.tokens_per_round and not reason and row.cut is None:
            token_id = request.input_ids[row.sent % len(request.input_ids)]
            batch.token_ids.append(token_id)
            batch.exit_depths.append(exit_depth(row.sent))
            row.sent += 1
            new += 1
            if row.sent == params.max_new_tokens:
                reason = FinishReason.LENGTH
            elif token_id in params.end_ids and row.sent > params.min_new_tokens:
                reason, matched = FinishReason.STOP_ID, token_id
        if new:
            batch.uids.append(uid)
            batch.counts.append(new)
            if params.logprobs:
                values = [-(i + 1) / 8 for i in range(row.sent - new, row.sent)]
                wants_tops = params.top_logprobs_num or params.token_ids_logprob
                tops = [self._tops(request) for _ in values] if wants_tops else []
                batch.logprobs[uid] = OutputLogprobs(values, tops)
        if row.cut is not None:
            reason, row.sent = FinishReason.STOP_STRING, row.cut
        if reason:
            del self._running[uid]
            cached = min(len(request.input_ids) - 1, 2)
            batch.finished.append(Finished(uid, reason, row.sent, cached, matched=matched))
