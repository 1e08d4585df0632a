"""The worker process: start-up, the loop between plan socket and device, shut-down."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import msgspec
import setproctitle
import torch
import zmq

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.ipc import Edge, Receiver, Sender
from ouro_sgl.messages import ExitMode, PlanMessage, ShutdownReq, WorkerFailed, WorkerReady
from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import dummy_weights, load_lookahead_head, load_weights, random_lookahead_head
from ouro_sgl.worker.executor import TorchExecutor
from ouro_sgl.worker.kv_pool import KVPool, resolve_num_slots
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.worker import Worker, WorkerSettings

logger = logging.getLogger(__name__)

CPU_MAX_ROWS = 16


def build(args: ServerArgs) -> tuple[Worker, WorkerReady]:
    """Load the checkpoint and lay out memory.

    Raises:
        ConfigError: the checkpoint or the settings cannot be served; names the value.
    """
    folder = Path(args.model_path)
    config = load_config(folder)
    device = torch.device("cpu")
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    context = args.context_length or config.max_position
    if context > config.max_position:
        raise ConfigError(
            f"--context-length {context} is above max_position_embeddings {config.max_position}"
        )
    if args.load_format == "dummy":
        weights = dummy_weights(config, dtype, device, args.random_seed)
    else:
        weights = load_weights(folder, config, dtype, device)
    model = OuroModel(config, weights, context)
    slots = resolve_num_slots(args, config, dtype)
    settings = WorkerSettings(
        max_rows=args.max_running_requests or CPU_MAX_ROWS,
        max_length=min(context, slots // config.total_loops),
        rounds_in_flight=args.rounds_in_flight or 1,  # a CPU launch is a computation: no gain in more
        shared_layout=args.kv_layout == "shared",
        min_coda_batch_size=args.min_coda_batch_size,
        max_prefill_batches_before_decode=args.max_prefill_batches_before_decode,
    )
    heads = {ExitMode.RANDOM_LOOKAHEAD: random_lookahead_head(args.lookahead_seed, config.hidden_size)}
    trained = load_lookahead_head(folder, config.hidden_size)
    if trained is not None:
        heads[ExitMode.LOOKAHEAD] = trained
    rows = Rows(
        settings.max_rows,
        settings.max_length,
        config.total_loops,
        config.vocab_size,
        config.hidden_size,
        dtype,
        device,
    )
    pool = KVPool(config, slots, dtype, device)
    executor = TorchExecutor(model, rows, pool, heads, settings.min_coda_batch_size)
    worker = Worker(rows, pool, executor, settings)
    return worker, _ready(config, context, slots, dtype, device, settings, trained is not None)


def _ready(
    config: OuroConfig,
    context: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    settings: WorkerSettings,
    has_lookahead: bool,
) -> WorkerReady:
    return WorkerReady(
        total_loops=config.total_loops,
        vocab_size=config.vocab_size,
        context_length=context,
        num_slots=slots,
        max_rows=settings.max_rows,
        rounds_in_flight=settings.rounds_in_flight,
        has_lookahead=has_lookahead,
        server_info={
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "slot_bytes": config.slot_elements() * dtype.itemsize,
            "attention_backend": "torch",
            "torch_version": str(torch.__version__),
        },
    )


def serve(worker: Worker, plans: Receiver[PlanMessage], events: Sender) -> None:
    """Run until a :class:`ShutdownReq`. Blocks on the plan socket when nothing runs."""
    while True:
        if worker.idle:
            plans.socket.poll()
        for message in plans.drain():
            if isinstance(message, ShutdownReq):
                return
            worker.apply(message)
        report = worker.step()
        if report is not None:
            events.send(report)


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
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s worker %(levelname)s %(message)s")

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
