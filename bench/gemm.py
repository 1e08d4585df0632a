"""Products of a decode round alone: the tiles in use against others, in microseconds.

    python -m bench.gemm [--rows 1,32,64,128] [--sweep]

Needs a CUDA device. Each timing replays a CUDA graph over several copies of a weight, so that no cache
holds it; the floor is the weight's bytes over the copy bandwidth measured in the same run. With
``--sweep`` the best tiles of a grid are shown beside those in use, and whether their bits agree: some
hundred kernels to compile for each number of rows.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch
from ouro_kernels.triton_ops import gemm
from triton.runtime.errors import OutOfResources

from bench.attention import copy_bandwidth, graph_time
from bench.cells import run_all
from bench.gpu import config_1_4b, make_model
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.worker.cuda_round import choose_products, split_counts

COPIES = 6


def grid(rows: int, inner: int) -> Iterator[gemm.GemmTile]:
    shapes = itertools.product((16, 32, 64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4, 6), (True, False))
    for block_m, block_n, block_k, warps, stages, swap in shapes:
        fits = max(16, rows // 2) <= block_m <= max(16, rows) and inner % block_k == 0
        if fits and (block_n if swap else block_m) * 2 >= 32 * warps:
            yield gemm.GemmTile(block_m, block_n, block_k, warps, stages, swap)


def run(name: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: gemm.GemmTile) -> None:
    if name == "gate_up":
        gemm.gate_up(x, weight, out, tile)
    else:
        gemm.linear(x, weight, out, tile, out.shape[0])


def run_cell(model: OuroModel, rows: int, copy: float, *, sweep: bool) -> None:
    layer = model.layers[0]
    splits = split_counts(model.config)
    tiles = choose_products(model, rows, splits)
    for name, weight, tile, parts in (
        ("qkv", layer.qkv, tiles.qkv, 1),
        ("out", layer.attention_out, tiles.out, splits[0]),
        ("gate_up", layer.gate_up, tiles.gate_up, 1),
        ("down", layer.down, tiles.down, splits[1]),
    ):
        width, inner = weight.shape
        weights = [weight.clone() for _ in range(COPIES)]
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        if name == "gate_up":
            out = torch.empty(rows, width // 2, device="cuda", dtype=torch.bfloat16)
        else:
            kind = torch.float32 if parts > 1 else torch.bfloat16
            out = torch.empty(parts, rows, width, device="cuda", dtype=kind)

        def seconds(
            tile: gemm.GemmTile,
            name: str = name,
            x: torch.Tensor = x,
            weights: list[torch.Tensor] = weights,
            out: torch.Tensor = out,
        ) -> float:
            return graph_time(lambda: [run(name, x, one, out, tile) for one in weights], 1) / COPIES

        used = seconds(tile)
        expected = out.clone()
        floor = weight.numel() * 2 / copy
        print(f"{rows} rows, {name}: {used * 1e6:.1f} us (floor {floor * 1e6:.1f}) {tile}", flush=True)
        results = []
        for other in grid(rows, inner // parts) if sweep else ():
            try:
                results.append((seconds(other), torch.equal(out, expected), other))
            except OutOfResources:
                continue
        for time, same, other in sorted(results, key=lambda result: result[0])[:3]:
            print(f"    {time * 1e6:.1f} us {other} {'same bits' if same else 'OTHER BITS'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,32,64,128")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    copy = copy_bandwidth()
    print(f"copy {copy / 1e12:.2f} TB/s, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    model = make_model(config_1_4b(layers=1))
    run_all(
        (f"{rows} rows", partial(run_cell, model, int(rows), copy, sweep=options.sweep))
        for rows in options.rows.split(",")
    )


if __name__ == "__main__":
    main()
