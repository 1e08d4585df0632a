"""From settings and a checkpoint to a ready worker: weights, memory, executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ouro_sgl.config import ServerArgs, check_cpu
from ouro_sgl.errors import ConfigError
from ouro_sgl.messages import ExitMode, WorkerReady
from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import (
    Head,
    dummy_weights,
    load_lookahead_head,
    load_weights,
    random_lookahead_head,
)
from ouro_sgl.worker.executor import Executor, TorchExecutor
from ouro_sgl.worker.kv_pool import KVPool, requested_slots
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.worker import Worker, WorkerSettings

CPU_MAX_ROWS, CUDA_MAX_ROWS = 16, 128
CPU_CHUNK, CUDA_CHUNK = 512, 4096
CPU_KV_BYTES = 512 << 20
CUDA_ROUNDS_IN_FLIGHT = 4


@dataclass
class Checkpoint:
    """A loaded model and its exit heads."""

    config: OuroConfig
    model: OuroModel
    heads: dict[ExitMode, Head]
    context: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        return self.config.slot_elements() * self.dtype.itemsize


def resolve_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    return torch.device(name)


def load_checkpoint(args: ServerArgs) -> Checkpoint:
    """Read config and weights.

    Raises:
        ConfigError: the checkpoint or a setting cannot be served; names the value.
    """
    folder = Path(args.model_path)
    config = load_config(folder)
    device = resolve_device(args.device)
    if args.dtype != "auto":
        dtype = getattr(torch, args.dtype)
    else:  # half precision is slow on most CPUs
        dtype = torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)
    context = args.context_length or config.max_position
    if args.load_format == "dummy":
        weights = dummy_weights(config, dtype, device, args.random_seed or 0)
    else:
        weights = load_weights(folder, config, dtype, device)
    heads = {ExitMode.RANDOM_LOOKAHEAD: random_lookahead_head(args.lookahead_seed, config.hidden_size)}
    trained = load_lookahead_head(folder, config.hidden_size)
    if trained is not None:
        heads[ExitMode.LOOKAHEAD] = trained
    return Checkpoint(config, OuroModel(config, weights, context), heads, context, dtype, device)


def build(args: ServerArgs) -> tuple[Worker, WorkerReady]:
    """Load the checkpoint and lay out memory.

    Raises:
        ConfigError: see :func:`load_checkpoint`; or too little memory, with the figures.
    """
    checkpoint = load_checkpoint(args)
    if checkpoint.device.type == "cuda":
        from ouro_sgl.worker.cuda_build import build_cuda  # needs triton

        return build_cuda(args, checkpoint)
    return build_cpu(args, checkpoint)


def build_cpu(args: ServerArgs, checkpoint: Checkpoint) -> tuple[Worker, WorkerReady]:
    check_cpu(args)
    config = checkpoint.config
    slots = requested_slots(args, config, checkpoint.slot_bytes)
    if slots is None:
        slots = CPU_KV_BYTES // checkpoint.slot_bytes
    check_slots(slots, checkpoint)
    # A CPU launch is a computation: more than one round in flight gains nothing.
    settings = make_settings(args, checkpoint, slots, CPU_MAX_ROWS, rounds_in_flight=1)
    rows = make_rows(settings, checkpoint)
    try:
        pool = KVPool(config, slots, checkpoint.dtype, checkpoint.device, poison=args.debug_poison_slots)
    except RuntimeError as error:
        raise ConfigError(
            f"there is no memory for {slots} KV slots of {checkpoint.slot_bytes:,} bytes: give it fewer with "
            f"--kv-cache-memory-bytes or --num-slots ({str(error).splitlines()[0]})"
        ) from None
    executor = TorchExecutor(checkpoint.model, rows, pool, checkpoint.heads, settings.min_coda_batch_size)
    info = {"attention_backend": "torch", "chunked_prefill_size": args.chunked_prefill_size or CPU_CHUNK}
    return finish(rows, pool, executor, settings, checkpoint, info)


def check_slots(slots: int, checkpoint: Checkpoint) -> None:
    """Raise :class:`ConfigError` unless two positions at full depth fit."""
    loops = checkpoint.config.total_loops
    if slots < 2 * loops:
        raise ConfigError(
            f"the KV pool has {slots} slots of {checkpoint.slot_bytes:,} bytes; a request of two tokens "
            f"needs {2 * loops} (one per token and loop): give it more memory or more --num-slots"
        )


def make_settings(
    args: ServerArgs, checkpoint: Checkpoint, slots: int, max_rows: int, rounds_in_flight: int
) -> WorkerSettings:
    return WorkerSettings(
        max_rows=args.max_running_requests or max_rows,
        max_length=min(checkpoint.context, slots // checkpoint.config.total_loops),
        rounds_in_flight=args.rounds_in_flight or rounds_in_flight,
        shared_layout=args.kv_layout == "shared",
        min_coda_batch_size=args.min_coda_batch_size,
        max_prefill_batches_before_decode=args.max_prefill_batches_before_decode,
    )


def make_rows(settings: WorkerSettings, checkpoint: Checkpoint) -> Rows:
    config = checkpoint.config
    return Rows(
        settings.max_rows,
        settings.max_length,
        config.total_loops,
        config.vocab_size,
        config.hidden_size,
        checkpoint.dtype,
        checkpoint.device,
    )


def finish(
    rows: Rows,
    pool: KVPool,
    executor: Executor,
    settings: WorkerSettings,
    checkpoint: Checkpoint,
    info: dict[str, Any],
) -> tuple[Worker, WorkerReady]:
    """The worker and what it tells the scheduler."""
    config = checkpoint.config
    ready = WorkerReady(
        total_loops=config.total_loops,
        vocab_size=config.vocab_size,
        context_length=checkpoint.context,
        num_slots=pool.num_slots,
        max_rows=settings.max_rows,
        rounds_in_flight=settings.rounds_in_flight,
        has_lookahead=ExitMode.LOOKAHEAD in checkpoint.heads,
        server_info={
            "device": str(checkpoint.device),
            "dtype": str(checkpoint.dtype).removeprefix("torch."),
            "slot_bytes": checkpoint.slot_bytes,
            "torch_version": str(torch.__version__),
            **info,
        },
    )
    return Worker(rows, pool, executor, settings), ready
