"""The parts of a prefill chunk alone: attention, gate and up with SwiGLU, and what its launch takes the host.

    python -m bench.chunk [--parts attention,gate_up,launch] [--seconds 0.3]

Needs a CUDA device. Kernels run back to back for ``--seconds`` before and while they are timed, in turn,
so that all have the clocks that the device's power limit leaves, and as CUDA graphs, so that none waits for
its launch; figures are medians of three turns.
``attention``: a chunk of 4,096 tokens behind so many earlier ones, the kernel in use against the Triton
kernel. ``gate_up``: the product with SwiGLU against cuBLAS and ``silu_and_multiply``. ``launch``: prompts of
1,024 in chunks of several sizes, as graphs and launched one by one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from ouro_kernels.triton_ops import hopper, norm, prefill
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.attention import captured
from bench.cells import run_all
from bench.gpu import Bench, config_1_4b, make_model

HEADS, HEAD_DIM = 16, 128
CALLS = 10  # of a kernel in a graph
CHUNKS = {"4x1024": [(0, 1024)] * 4, "4096": [(0, 4096)]} | {
    f"4096 behind {before}": [(before, before + 4096)] for before in (12288, 61312)
}


def medians(arms: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of one call of each."""
    graphs = {name: captured(call, CALLS) for name, call in arms.items()}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(3):
        for name, graph in graphs.items():
            repeat(graph, seconds)
            found[name].append(repeat(graph, seconds) / CALLS)
    return {name: statistics.median(values) for name, values in found.items()}


def repeat(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Replay it for so long, some times between two looks at the clock: seconds of one replay."""
    replays = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(5):
            graph.replay()
        replays += 5
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / replays


def attention(name: str, seconds: float) -> None:
    segments = [(row, start, end) for row, (start, end) in enumerate(CHUNKS[name])]
    tokens = sum(end - start for _, start, end in segments)
    capacity = sum(-(-end // 128) * 128 for _, _, end in segments)
    query = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    flops = sum(4 * HEADS * HEAD_DIM * (position + 1) for _, a, b in segments for position in range(a, b))
    modules = {
        "triton": (64, 64, TensorDescriptor.from_tensor, partial(prefill.prefill_attention, block_q=64))
    }
    if hopper.supported(query.device, query.dtype):
        of = hopper.prefill
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        attend = partial(of.prefill_attention, programs=programs)
        modules["hopper"] = (of.BLOCK_Q, of.BLOCK_K, hopper.products.describe, attend)
    arms = {}
    for kind, (block_q, block_k, describe, attend) in modules.items():
        packed = prefill.PackedKV(capacity, HEADS, HEAD_DIM, block_k, query.dtype, query.device, describe)
        packed.keys.normal_()
        packed.values.normal_()
        (group,) = prefill.plan_groups(segments, block_q, block_k, capacity)
        blocks = torch.tensor(group.blocks, dtype=torch.int32, device="cuda")
        count = torch.tensor([len(group.blocks)], dtype=torch.int32, device="cuda")
        tiles = packed.key_tiles, packed.value_tiles
        arms[kind] = partial(attend, query, *tiles, blocks, count, out, HEAD_DIM**-0.5, HEADS)
    for kind, taken in medians(arms, seconds).items():
        print(
            f"attention, {name}, {kind}: {taken * 1e6:.1f} us, {flops / taken / 1e12:.0f} TFLOP/s", flush=True
        )


def gate_up(rows: int, seconds: float) -> None:
    config = config_1_4b()
    x = torch.randn(rows, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    shape = 2 * config.intermediate_size, config.hidden_size
    weight = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / config.hidden_size**0.5
    linear = torch.nn.functional.linear

    def apart() -> torch.Tensor:
        return norm.silu_and_multiply(linear(x, weight))

    arms: dict[str, Callable[[], object]] = {
        "cuBLAS alone": partial(linear, x, weight),
        "cuBLAS, SwiGLU": apart,
    }
    same = ""
    if hopper.supported(x.device, x.dtype):
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        arms["hopper"] = partial(hopper.chunk.gate_up, x, weight, programs)
        same = f"; same bits: {torch.equal(hopper.chunk.gate_up(x, weight, programs), apart())}"
    flops = 2 * rows * weight.numel()
    found = medians(arms, seconds)
    figures = (
        f"{name} {taken * 1e6:.1f} us, {flops / taken / 1e12:.0f} TFLOP/s" for name, taken in found.items()
    )
    print(f"gate_up, {rows} rows: {'; '.join(figures)}{same}", flush=True)


def launch() -> None:
    model = make_model(config_1_4b())
    rows, context = 16, 1024
    depths = [[4]] * rows
    for graphs in (True, False):
        bench = Bench(model, rows, context, 1, graphs=graphs)
        executor = bench.worker._executor
        inner, spent = executor.launch_chunk, []

        def timed(
            *arguments: object, inner: Callable[..., object] = inner, spent: list[float] = spent
        ) -> object:
            begin = time.perf_counter()
            pending = inner(*arguments)
            spent.append(time.perf_counter() - begin)
            return pending

        executor.launch_chunk = timed
        for size in (4096, 3072, 1024, 256):
            bench.max_chunk = size
            bench.prefill(depths)
            spent.clear()
            seconds = bench.prefill(depths)
            print(
                f"launch, chunks of {size}, {'graphs' if graphs else 'one by one'}: "
                f"{rows * context / seconds:.0f} tok/s, {1e3 * seconds / len(spent):.1f} ms per chunk, "
                f"{1e3 * statistics.mean(spent):.1f} ms of the host",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="attention,gate_up,launch")
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    cells: dict[str, list[tuple[str, Callable[[], None]]]] = {
        "attention": [(name, partial(attention, name, options.seconds)) for name in CHUNKS],
        "gate_up": [(f"{rows} rows", partial(gate_up, rows, options.seconds)) for rows in (1024, 4096)],
        "launch": [("launch", launch)],
    }
    run_all(cell for part in options.parts.split(",") for cell in cells[part])


if __name__ == "__main__":
    main()
