"""The worker process: start-up, the loop between plan socket and device, shut-down."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from pathlib import Path

import msgspec
import setproctitle
import torch
import zmq

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.ipc import Edge, Receiver, Sender
from ouro_sgl.log import setup_logging
from ouro_sgl.messages import PlanMessage, Profile, ShutdownReq, UpdateWeights, WorkerFailed
from ouro_sgl.worker.build import build
from ouro_sgl.worker.profile import Profiler
from ouro_sgl.worker.worker import Worker

logger = logging.getLogger(__name__)


def serve(worker: Worker, plans: Receiver[PlanMessage], events: Sender) -> None:
    """Run until a :class:`ShutdownReq`. Blocks on the plan socket when nothing runs."""
    stopping = False
    profiler = Profiler()
    waiting: deque[PlanMessage] = deque()

    def turn() -> None:
        """Apply what has come, let the worker take one step, send what it has to say.

        New weights and profiles wait, and what comes after them, until no chunk is half launched.
        """
        nonlocal stopping
        waiting.extend(plans.drain())
        while waiting and not (worker.launching_chunk and isinstance(waiting[0], UpdateWeights | Profile)):
            message = waiting.popleft()
            if isinstance(message, ShutdownReq):
                stopping = True
            elif isinstance(message, UpdateWeights):
                events.send(worker.update_weights(message))
            elif isinstance(message, Profile):
                events.send(profiler.handle(message))
            else:
                worker.apply(message)
        if not worker.launching_chunk:
            profiler.check_time()
        report = worker.step()
        if report is not None:
            events.send(report)

    worker.between_layers = turn
    while not stopping:
        if worker.idle and not waiting:
            plans.socket.poll(profiler.milliseconds_left())
        turn()


def _exit_with_parent() -> None:
    """The parent holds our standard input open for its whole life: its end is the parent's end."""
    # Not through sys.stdin: its lock, held here for ever, would break the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(ipc_dir: Path) -> int:
    """The process; returns its exit status."""
    setproctitle.setproctitle("ouro_sgl::worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when we stop
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # Fixed before the first product: exactness on the CPU assumes one thread count for life. One,
    # because the three processes share the cores and small products gain nothing from more.
    torch.set_num_threads(1)
    args = msgspec.json.decode((ipc_dir / "config.json").read_bytes(), type=ServerArgs)
    setup_logging("worker", args.log_level)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans: Receiver[PlanMessage] = Receiver(context, Edge.SCHEDULER_TO_WORKER, ipc_dir, bind=False)
    events = Sender(context, Edge.WORKER_TO_SCHEDULER, ipc_dir, bind=False)
    status = 0
    try:
        worker, ready = build(args)
        events.socket.send(msgspec.msgpack.encode(ready))  # blocks until the scheduler has bound
        serve(worker, plans, events)
    except ConfigError as error:
        events.socket.send(msgspec.msgpack.encode(WorkerFailed(str(error))))
        status = 1
    except Exception as error:
        logger.exception("the worker cannot go on")
        events.socket.send(msgspec.msgpack.encode(WorkerFailed(f"{type(error).__name__}: {error}")))
        status = 1
    events.close()
    plans.close()
    context.term()
    return status
