"""Decode attention alone: bytes per second of K and V read, per cell and launch shape.

    python bench/attention.py [--sweep]

Needs a CUDA device. Each timing replays a CUDA graph over several layers' pools, so that no cache
holds them. The floor is a device-to-device copy measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import triton
from ouro_kernels.triton_ops import attention

HEADS, HEAD_DIM = 16, 128
CELLS = [(1024, 1), (1024, 32), (1024, 128), (4096, 16), (4096, 64), (16384, 4), (65408, 1)]


def graph_time(launch: object, repeats: int = 3) -> float:
    """Median seconds of one call, from replays of a graph of ``repeats`` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            launch()
    return triton.testing.do_bench(graph.replay, warmup=5, rep=40, return_mode="median") / 1e3 / repeats


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large elementwise kernel."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / graph_time(lambda: torch.mul(source, 1.0, out=target))


def make_work(lengths: list[int]) -> attention.WorkList:
    work = attention.WorkList(len(lengths), max(lengths), HEADS, HEAD_DIM, torch.device("cuda"))
    tiles: list[tuple[int, int]] = []
    starts = []
    for lane, length in enumerate(lengths):
        size = attention.SHORT_SPLIT if length <= attention.SHORT_LENGTH else attention.LONG_SPLIT
        starts.append(len(tiles))
        tiles += [(lane, split) for split in range(-(-length // size))]
    work.tile_start[:] = torch.tensor(starts)
    work.table_index[:] = torch.arange(len(lengths))
    work.length[:] = torch.tensor(lengths)
    work.tile_lane[: len(tiles)] = torch.tensor([lane for lane, _ in tiles])
    work.tile_split[: len(tiles)] = torch.tensor([split for _, split in tiles])
    work.num_tiles[0] = len(tiles)
    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="try launch shapes, not just the one in use")
    sweep = parser.parse_args().sweep
    copy = copy_bandwidth()
    units = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"copy {copy / 1e12:.2f} TB/s, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    shapes = [(32, 2, 2, 16)]
    splits = [(attention.SHORT_SPLIT, attention.LONG_SPLIT)]
    if sweep:
        shapes = list(itertools.product((32, 64), (2, 4), (2, 3), (16, 32)))
        splits = [(64, 256), (128, 512), (256, 512), (512, 1024)]
    for length, lanes in CELLS:
        bytes_read = lanes * length * HEADS * HEAD_DIM * 4
        layers = max(2, min(8, int(1.2e9 / bytes_read)))
        slots = lanes * length + 64
        pools = [
            torch.randn(2, slots, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(layers)
        ]
        table = torch.randperm(slots, device="cuda")[: lanes * length].int().view(lanes, length)
        query = torch.randn(lanes, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(query)
        count = torch.tensor([lanes], dtype=torch.int32, device="cuda")
        results = []
        for split in splits:
            attention.SHORT_SPLIT, attention.LONG_SPLIT = split
            work = make_work([length] * lanes)
            for tile, warps, stages, per_unit in shapes:
                if tile > min(split):
                    continue

                def launch(
                    work: attention.WorkList = work,
                    shape: tuple[int, ...] = (per_unit, tile, stages, warps),
                ) -> None:
                    programs, tile, stages, warps = shape[0] * units, *shape[1:]
                    for keys, values in pools:
                        attention.decode_attention(
                            query,
                            keys,
                            values,
                            table,
                            work,
                            count,
                            out,
                            HEAD_DIM**-0.5,
                            programs,
                            tile,
                            stages,
                            warps,
                        )

                seconds = graph_time(launch) / layers
                results.append((seconds, split, tile, warps, stages, per_unit))
        results.sort()
        print(f"{length}x{lanes}:", end="")
        for seconds, split, tile, warps, stages, per_unit in results[:6]:
            speed = bytes_read / seconds
            print(
                f" {seconds * 1e6:.1f}us {speed / 1e12:.2f}TB/s {speed / copy:.0%} "
                f"(split {split}, tile {tile}, warps {warps}, stages {stages}, {per_unit}/SM)",
                end=";",
            )
        print(flush=True)


if __name__ == "__main__":
    main()
