"""Memory layout on a CUDA device: everything but the KV pool first, then as many slots as fit."""

from __future__ import annotations

import gc

import torch

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.messages import Chunk, Segment, WorkerReady
from ouro_sgl.models.config import OuroConfig
from ouro_sgl.worker import build
from ouro_sgl.worker.build import Checkpoint
from ouro_sgl.worker.cuda_executor import CudaExecutor
from ouro_sgl.worker.kv_pool import KVPool, requested_slots
from ouro_sgl.worker.prefill import Prompt
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish
from ouro_sgl.worker.worker import Worker, WorkerSettings

DEFAULT_FRACTION = 0.9
DEFAULT_RESERVE = 256 << 20
GRAPH_RESERVE = 1 << 30


def build_cuda(args: ServerArgs, checkpoint: Checkpoint) -> tuple[Worker, WorkerReady]:
    """A worker on the GPU, with the Triton kernels (``--attention-backend triton``).

    Raises:
        ConfigError: too little memory, with the figures and what to lower.
    """
    if args.attention_backend == "torch":
        raise ConfigError("--attention-backend torch is the CPU's; a GPU worker takes triton")
    check_model(checkpoint)
    chunk = args.chunked_prefill_size or build.CUDA_CHUNK
    slots = requested_slots(args, checkpoint.config, checkpoint.slot_bytes)
    if slots is None:
        slots = fitting_slots(args, checkpoint, chunk)
    build.check_slots(slots, checkpoint)
    settings = build.make_settings(args, checkpoint, slots, build.CUDA_MAX_ROWS, build.CUDA_ROUNDS_IN_FLIGHT)
    rows = build.make_rows(settings, checkpoint)
    pool = KVPool(
        checkpoint.config, slots, checkpoint.dtype, checkpoint.device, poison=args.debug_poison_slots
    )
    executor = make_executor(args, checkpoint, settings, rows, pool, chunk, graphs=with_graphs(args))
    # Without graphs, kernels of a chunk compile at their first launch: here, and not while rows wait for
    # rounds. One that starts behind a cached position needs them all.
    end = min(18, settings.max_length)
    run_chunk(executor, rows, 1, end, [0] * end * rows.total_loops, checkpoint)
    info = {
        "attention_backend": "triton",
        "cuda_graphs": executor.graphs,
        "prefill_graphs": executor.prefill_graphs,
        "prefill_row_counts": executor.prefill_row_counts,
        "single_stream": executor.one_stream,
        "device_name": torch.cuda.get_device_name(checkpoint.device),
        "chunked_prefill_size": chunk,
    }
    return build.finish(rows, pool, executor, settings, checkpoint, info)


def check_model(checkpoint: Checkpoint) -> None:
    """What the CUDA kernels need of a device and of a model's shape.

    Raises:
        ConfigError: names what they cannot run.
    """
    major, minor = torch.cuda.get_device_capability(checkpoint.device)
    if major < 9:
        name = torch.cuda.get_device_name(checkpoint.device)
        raise ConfigError(
            f"the CUDA kernels read by TMA, which needs compute capability 9.0: {name} has {major}.{minor}"
        )
    check_shape(checkpoint.config)


def check_shape(config: OuroConfig) -> None:
    """Raises ConfigError for a shape that the CUDA kernels do not cover."""
    if config.head_dim < 16 or config.head_dim & (config.head_dim - 1):
        raise ConfigError(f"head_dim {config.head_dim}: the CUDA kernels need a power of two from 16 on")
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % 16:
            raise ConfigError(f"{name} {getattr(config, name)}: the CUDA kernels need a multiple of 16")


def with_graphs(args: ServerArgs) -> bool:
    return args.cuda_graphs is not False and args.static_buffers is not False


def make_executor(
    args: ServerArgs,
    checkpoint: Checkpoint,
    settings: WorkerSettings,
    rows: Rows,
    pool: KVPool,
    chunk: int,
    *,
    graphs: bool,
) -> CudaExecutor:
    return CudaExecutor(
        checkpoint.model,
        rows,
        pool,
        checkpoint.heads,
        min_coda_batch_size=settings.min_coda_batch_size,
        max_chunk=chunk,
        blocks=settings.rounds_in_flight + 1,
        graphs=graphs,
        max_graph_rows=args.cuda_graph_max_bs,
        max_graphs=args.cuda_graph_max_graphs,
        static_buffers=args.static_buffers is not False,
        single_stream=args.single_stream is not False,
        power_of_two=bool(args.pad_to_power_of_two),
    )


def fitting_slots(args: ServerArgs, checkpoint: Checkpoint, chunk: int) -> int:
    """Slots that fit the budget, by measuring everything else: static buffers and one largest chunk
    are really allocated and run on a pool of one chunk, then freed. Graphs of chunks take as much memory as
    that chunk once more."""
    device = checkpoint.device
    _free_unused()
    total = torch.cuda.get_device_properties(device).total_memory
    loops = checkpoint.config.total_loops
    probe_tokens = min(chunk, checkpoint.context)
    probe = build.make_settings(
        args, checkpoint, checkpoint.context * loops, build.CUDA_MAX_ROWS, build.CUDA_ROUNDS_IN_FLIGHT
    )
    rows = build.make_rows(probe, checkpoint)
    pool = KVPool(checkpoint.config, probe_tokens * loops, checkpoint.dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    executor = make_executor(args, checkpoint, probe, rows, pool, chunk, graphs=False)
    built = torch.cuda.max_memory_allocated(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.rehearse_chunk()
    torch.cuda.synchronize()
    captured = torch.cuda.max_memory_allocated(device) - before if with_graphs(args) else 0
    run_chunk(executor, rows, 0, probe_tokens, list(range(probe_tokens * loops)), checkpoint)
    peak = max(built, torch.cuda.max_memory_allocated(device) + captured)
    peak -= probe_tokens * loops * checkpoint.slot_bytes
    del executor, pool, rows
    _free_unused()

    # The share is one of the whole device and counts what is ours alone: what others hold only limits
    # it where less is left. What the allocator holds but does not use is ours to use.
    free, _ = torch.cuda.mem_get_info(device)
    foreign = total - free - torch.cuda.memory_reserved(device)
    fraction = DEFAULT_FRACTION if args.mem_fraction_static is None else args.mem_fraction_static
    reserve = DEFAULT_RESERVE if args.memory_reserve_bytes is None else args.memory_reserve_bytes
    ours = min(int(total * fraction), total - foreign - reserve)
    graphs = 0
    if with_graphs(args):
        asked = args.cuda_graph_memory_reserve_bytes
        graphs = GRAPH_RESERVE if asked is None else asked
    budget = ours - graphs - peak
    if budget < 2 * loops * checkpoint.slot_bytes:
        gib = 1 / (1 << 30)
        raise ConfigError(
            f"no memory is left for KV: {ours * gib:.1f} GiB are ours (at most {fraction:.0%} of "
            f"{total * gib:.1f} GiB, and what {foreign * gib:.1f} GiB of others and {reserve * gib:.2f} GiB "
            f"--memory-reserve-bytes leave), less {peak * gib:.1f} GiB for weights, buffers and a chunk of "
            f"{chunk} tokens and {graphs * gib:.2f} GiB for graphs; lower "
            "--chunked-prefill-size, --max-running-requests or --context-length, or raise "
            "--mem-fraction-static"
        )
    # More than all rows at full length cannot be in use at once, and the scheduler keeps books on each.
    return min(budget // checkpoint.slot_bytes, probe.max_rows * probe.max_length * loops)


def _free_unused() -> None:
    """Give back what an executor that is gone has left, cuBLAS's workspaces of its streams included."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def run_chunk(
    executor: CudaExecutor, rows: Rows, start: int, end: int, slots: list[int], checkpoint: Checkpoint
) -> None:
    """One chunk of a prompt on row 0, which no request has yet. slots: of positions 0 .. end, [T * end]."""
    with executor.prefilling():
        tokens = torch.zeros(end, dtype=torch.int64, device=checkpoint.device)
        prompt = Prompt(0, 0, tokens, 0, 0, LogprobWish(0, ()))
        rows.set_prompt_slots(0, 0, slots)
    chunk = Chunk(0, [Segment(0, 0, start, end, [])])
    executor.launch_chunk(chunk, {0: prompt}, lambda: None).result()
    torch.cuda.synchronize()
