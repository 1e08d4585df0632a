"""Decode attention alone: bytes per second of K and V read, per cell and launch shape.

    python -m bench.attention [--sweep]

Needs a CUDA device. Each timing replays a CUDA graph over several layers' pools, so that no cache
holds them. The floor is a device-to-device copy measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
import triton
from ouro_kernels.triton_ops import attention

from bench.cells import run_all

HEADS, HEAD_DIM = 16, 128
CELLS = [
    (1024, 1),
    (1024, 32),
    (1036, 32),
    (1024, 128),
    (1036, 128),
    (4096, 16),
    (4096, 64),
    (16384, 4),
    (65408, 1),
]


def captured(launch: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls; what the first one compiles or allocates is done before."""
    with torch.cuda.stream(torch.cuda.Stream()):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            launch()
    return graph


def graph_time(launch: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of one call, from replays of a graph of ``repeats`` calls."""
    graph = captured(launch, repeats)
    return triton.testing.do_bench(graph.replay, warmup=5, rep=40, return_mode="median") / 1e3 / repeats


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large elementwise kernel."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / graph_time(lambda: torch.mul(source, 1.0, out=target))


def time_layers(
    pools: list[torch.Tensor],
    qkv: torch.Tensor,
    table: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    work: attention.WorkList,
    out: torch.Tensor,
    shape: tuple[int, int],
) -> float:
    """Seconds per layer; shape: (stages, warps)."""

    def launch() -> None:
        for keys, values in pools:
            attention.decode_attention(qkv, keys, values, table, *angles, work, out, HEAD_DIM**-0.5, *shape)

    return graph_time(launch) / len(pools)


def run_cell(
    length: int,
    lanes: int,
    units: int,
    shapes: list[tuple[int, int, int]],
    angles: tuple[torch.Tensor, torch.Tensor],
    copy: float,
) -> None:
    """Print the best of ``shapes`` (warps, stages, programs per unit)."""
    bytes_read = lanes * length * HEADS * HEAD_DIM * 4
    layers = max(2, min(8, int(1.2e9 / bytes_read)))
    slots = lanes * length + 64
    pools = [
        torch.randn(2, slots, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(layers)
    ]
    table = torch.randperm(slots, device="cuda")[: lanes * length].int().view(lanes, length)
    qkv = torch.randn(lanes, 3 * HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(lanes, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    results = []
    for warps, stages, per_unit in shapes:
        ranges = per_unit * units // HEADS
        work = attention.WorkList(lanes, length, HEADS, HEAD_DIM, ranges, table.device)
        work.fill(list(range(lanes)), [length] * lanes)
        seconds = time_layers(pools, qkv, table, angles, work, out, (stages, warps))
        results.append((seconds, warps, stages, per_unit))
    results.sort()
    print(f"{length}x{lanes}:", end="")
    for seconds, warps, stages, per_unit in results[:4]:
        speed = bytes_read / seconds
        print(
            f" {seconds * 1e6:.1f}us {speed / 1e12:.2f}TB/s {speed / copy:.0%} "
            f"(warps {warps}, stages {stages}, {per_unit}/SM)",
            end=";",
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="try launch shapes, not just the one in use")
    sweep = parser.parse_args().sweep
    copy = copy_bandwidth()
    units = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"copy {copy / 1e12:.2f} TB/s, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    angles = tuple(torch.randn(65536, HEAD_DIM // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shapes = list(itertools.product((1, 2, 4), (2, 3), (8, 16))) if sweep else [(2, 2, 8)]
    run_all(
        (f"{length}x{lanes}", partial(run_cell, length, lanes, units, shapes, angles, copy))
        for length, lanes in CELLS
    )


if __name__ == "__main__":
    main()
