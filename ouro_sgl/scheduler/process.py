"""The scheduler process: sockets, start-up handshake, main loop.

It sleeps in one poll over both sockets, the word of its grammars and its standard input, whose end
says that the parent is gone. Whatever woke it, it takes in everything that has arrived, makes one step
and sends at most one plan and one batch of output.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
from setproctitle import setproctitle

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import EngineDeadError, IntegrityError
from ouro_sgl.ipc import Edge, Receiver, Sender
from ouro_sgl.log import setup_logging
from ouro_sgl.messages import (
    AbortReq,
    ControlReq,
    GenerateReq,
    Profiled,
    RoundEvents,
    SampleReq,
    SchedulerFailed,
    SchedulerReady,
    ShutdownReq,
    StopReq,
    WeightsUpdated,
    WorkerFailed,
    WorkerReady,
)
from ouro_sgl.scheduler.config import SchedulerConfig
from ouro_sgl.scheduler.grammar import GrammarEngine
from ouro_sgl.scheduler.scheduler import Scheduler

IDLE_CHECK_MS = 1000  # quiet time after which an idle scheduler checks its books, once

logger = logging.getLogger(__name__)


class ParentGoneError(Exception):
    """Standard input ended: nobody is left to serve."""


class SchedulerProcess:
    """One scheduler between the four sockets of a private directory."""

    def __init__(self, args: ServerArgs, ipc_dir: Path, stdin: int) -> None:
        """Bind the sockets.

        Args:
            args: the server's settings.
            ipc_dir: the private directory.
            stdin: file descriptor whose end means that the parent is gone.
        """
        self.args = args
        self.ipc_dir = ipc_dir
        self.context: zmq.Context[Any] = zmq.Context()
        self.from_frontend: Receiver[Any] = Receiver(
            self.context, Edge.FRONTEND_TO_SCHEDULER, ipc_dir, bind=True
        )
        self.to_frontend = Sender(self.context, Edge.SCHEDULER_TO_FRONTEND, ipc_dir, bind=True)
        self.from_worker: Receiver[Any] = Receiver(self.context, Edge.WORKER_TO_SCHEDULER, ipc_dir, bind=True)
        self.to_worker = Sender(self.context, Edge.SCHEDULER_TO_WORKER, ipc_dir, bind=True)
        self.stdin = stdin
        self.grammars: GrammarEngine | None = None
        self.grammar_news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller = zmq.Poller()
        for source in (self.from_frontend.socket, self.from_worker.socket, self.grammar_news, stdin):
            self.poller.register(source, zmq.POLLIN)
        self.scheduler: Scheduler | None = None

    def run(self) -> int:
        """Serve until told to stop. Returns the exit code of the process."""
        try:
            self.startup()
            self.main_loop()
        except ParentGoneError:
            shutil.rmtree(self.ipc_dir, ignore_errors=True)  # a parent that was killed has not
            return 0
        except EngineDeadError as error:
            self.report_failure(str(error))
            return 1
        except Exception as error:
            logger.exception("the scheduler cannot go on")
            self.report_failure(f"the scheduler failed: {error}")
            return 1
        finally:
            if self.grammars is not None:
                self.grammars.close()
            os.close(self.grammar_news)
            for end in (self.from_frontend, self.to_frontend, self.from_worker, self.to_worker):
                end.close()
            self.context.term()
        return 0

    def startup(self) -> None:
        """Wait for the worker, then tell the frontend what there is.

        Raises:
            ParentGoneError: the parent went away, or gave up, meanwhile.
            EngineDeadError: the worker could not start.
        """
        ready = self.await_worker()
        config = SchedulerConfig.resolve(self.args, ready)
        folder = Path(self.args.tokenizer_path or self.args.model_path or "")
        self.grammars = GrammarEngine(
            folder, ready.vocab_size, wake=lambda: os.eventfd_write(self.grammar_news, 1)
        )
        self.scheduler = Scheduler(config, self.grammars)
        context = ready.context_length
        if self.args.context_length is not None:
            context = min(context, self.args.context_length)
        self.await_peer(self.to_worker)
        self.await_peer(self.to_frontend)
        self.send_to_frontend(
            SchedulerReady(
                total_loops=ready.total_loops,
                vocab_size=ready.vocab_size,
                context_length=context,
                served_length=min(context, ready.num_slots // ready.total_loops),
                num_slots=ready.num_slots,
                max_rows=ready.max_rows,
                has_lookahead=ready.has_lookahead,
                server_info={
                    **ready.server_info,
                    "rounds_in_flight": config.rounds_in_flight,
                    "kv_layout": config.kv_layout,
                    "radix_cache": config.radix_cache,
                    "radix_insert_generated": config.radix_insert_generated,
                    "schedule_policy": config.schedule_policy,
                    "max_prefill_tokens": config.max_prefill_tokens,
                },
            )
        )
        # Modules and settings live as long as the process: no collection need look at them again.
        gc.collect()
        gc.freeze()

    def await_worker(self) -> WorkerReady:
        """The worker's first message; see :meth:`startup` for what it raises."""
        while True:
            self.wait(None)
            message = self.from_worker.receive(0)
            if isinstance(message, WorkerReady):
                return message
            if isinstance(message, WorkerFailed):
                raise EngineDeadError(message.message)
            if message is not None:
                raise IntegrityError(f"the worker began with {type(message).__name__}")
            # Nothing is served yet, so the only thing that the frontend can want is to stop.
            if self.from_frontend.receive(0) is not None:
                raise ParentGoneError

    def main_loop(self) -> None:
        """Events and requests in, plans and output out, until a :class:`ShutdownReq`."""
        scheduler = self.scheduler
        assert scheduler is not None
        checked = False
        while True:
            unchecked_idle = scheduler.idle and not checked
            if not self.wait(self.timeout_ms(IDLE_CHECK_MS if unchecked_idle else None)):
                if unchecked_idle:
                    scheduler.check_integrity()
                    checked = True
            else:
                checked = False
            # Events first: a request that has ended on the device has ended, whatever came since.
            for message in self.from_worker.drain():
                if isinstance(message, RoundEvents):
                    scheduler.process_events(message)
                elif isinstance(message, WeightsUpdated):
                    scheduler.weights_updated(message)
                elif isinstance(message, Profiled):
                    scheduler.profiled(message)
                elif isinstance(message, WorkerFailed):
                    raise EngineDeadError(message.message)
                else:
                    raise IntegrityError(f"unexpected {type(message).__name__} from the worker")
            for message in self.from_frontend.drain():
                if isinstance(message, GenerateReq):
                    scheduler.add(message)
                elif isinstance(message, SampleReq):
                    scheduler.add_sample(message)
                elif isinstance(message, AbortReq):
                    scheduler.abort(message.uids, message.cause)
                elif isinstance(message, StopReq):
                    scheduler.stop(message.uid, message.num_tokens)
                elif isinstance(message, ControlReq):
                    scheduler.control(message, time.monotonic())
                elif isinstance(message, ShutdownReq):
                    self.shutdown(message)
                    return
            plan = scheduler.step()
            if plan is not None:
                self.send_to_worker(plan)
            for order in scheduler.take_orders():
                self.send_to_worker(order)
            output = scheduler.take_output()
            if output is not None:
                self.send_to_frontend(output)
            for reply in scheduler.take_replies(time.monotonic()):
                self.send_to_frontend(reply)

    def shutdown(self, message: ShutdownReq) -> None:
        """Pass the word on and end what still runs."""
        self.send_to_worker(message)
        self.fail_requests("the server is shutting down")

    def report_failure(self, message: str) -> None:
        """End every request and tell the frontend why, if it is there to hear it."""
        try:
            self.await_peer(self.to_frontend)
            self.fail_requests(message)
            self.send_to_frontend(SchedulerFailed(message))
        except ParentGoneError:
            logger.error("nobody is left to hear: %s", message)

    def fail_requests(self, message: str) -> None:
        """Give every request its terminal message."""
        if self.scheduler is None:
            return
        self.scheduler.fail_all(message)
        output = self.scheduler.take_output()
        if output is not None:
            self.send_to_frontend(output)

    def send_to_worker(self, message: Any) -> None:
        """Send, or raise :class:`EngineDeadError` when the worker is no longer there."""
        try:
            self.to_worker.send(message)
        except zmq.Again:
            raise EngineDeadError("the worker is gone") from None

    def send_to_frontend(self, message: Any) -> None:
        """Send, or raise :class:`ParentGoneError`: the frontend lives in the parent process."""
        try:
            self.to_frontend.send(message)
        except zmq.Again:
            raise ParentGoneError from None

    def timeout_ms(self, limit: int | None) -> int | None:
        """Milliseconds to sleep at most: ``limit`` (None: none), or until an answer is due."""
        assert self.scheduler is not None
        deadline = self.scheduler.next_deadline()
        if deadline is None:
            return limit
        left = max(0, int((deadline - time.monotonic()) * 1000) + 1)
        return left if limit is None else min(left, limit)

    def wait(self, timeout_ms: int | None) -> bool:
        """Sleep until a message is here (True) or the time is over (False).

        Raises:
            ParentGoneError: standard input ended.
        """
        ready = dict(self.poller.poll(timeout_ms))
        if ready.get(self.stdin) and not os.read(self.stdin, 4096):
            raise ParentGoneError
        if ready.get(self.grammar_news):
            os.eventfd_read(self.grammar_news)
        return bool(ready)

    def await_peer(self, sender: Sender) -> None:
        """Wait until the other end of ``sender`` is connected: before that nothing can be sent.

        There is no time limit: the parent watches all processes and gives up when one is gone.

        Raises:
            ParentGoneError: standard input ended.
        """
        poller = zmq.Poller()
        poller.register(sender.socket, zmq.POLLOUT)
        poller.register(self.stdin, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if ready.get(self.stdin) and not os.read(self.stdin, 4096):
                raise ParentGoneError
            if ready.get(sender.socket):
                return


def main(ipc_dir: Path) -> int:
    """Run the process whose settings lie in ``ipc_dir / "config.json"``; returns its exit code."""
    setproctitle("ouro_sgl::scheduler")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    args = msgspec.json.decode((ipc_dir / "config.json").read_bytes(), type=ServerArgs)
    setup_logging("scheduler", args.log_level)
    return SchedulerProcess(args, ipc_dir, sys.stdin.fileno()).run()
