"""Decode rounds against their byte floor, through the worker's real loop.

    python -m bench.rounds [--cells 1024x1,1024x32] [--outputs 24] [--pdl on,off] [--profile]

Needs a CUDA device. Depth is 4 for every token; a round's floor is its bytes over the copy bandwidth
measured in the same run.
"""

from __future__ import annotations

import argparse
import gc

import torch

from bench.attention import copy_bandwidth
from bench.gpu import Bench, config_1_4b, make_model, round_bytes
from ouro_sgl.models.ouro import OuroModel

CELLS = "1024x1,1024x32,1024x128,4096x16,16384x4,65408x1"


def run_cell(model: OuroModel, cell: str, outputs: int, copy: float, variant: str, *, profile: bool) -> None:
    """Print one line for a cell, and with ``profile`` the time of each kernel."""
    context, rows = map(int, cell.split("x"))
    depths = [[4] * outputs for _ in range(rows)]
    bench = Bench(model, rows, context, outputs, pdl=variant != "off")
    bench.prefill(depths)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    if profile:
        with profiler:
            seconds, rounds, _ = bench.decode(depths)
    else:
        seconds, rounds, _ = bench.decode(depths)
    config = model.config
    floor = round_bytes(config, [context + outputs // 2] * rows)
    floor += config.vocab_size * config.hidden_size * 2 // 4  # lm_head in one round of four
    per_round = seconds / rounds
    print(
        f"{cell} pdl {variant}: {per_round * 1e6:.0f} us per round, {floor / copy / per_round:.0%} of the "
        f"floor ({floor / copy * 1e6:.0f} us)",
        flush=True,
    )
    if profile:
        for row in sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)[:14]:
            total = row.device_time_total / rounds
            print(f"    {total:8.1f} us per round  {row.count / rounds:6.1f} x {row.key[:60]}")
    del bench
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--outputs", type=int, default=24)
    parser.add_argument(
        "--pdl",
        default="on",
        choices=("on", "off", "on,off"),
        help="programmatic dependent launch",
    )
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    options = parser.parse_args()
    copy = copy_bandwidth()
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(0)
    print(f"copy {copy / 1e12:.2f} TB/s, {name}, torch {torch.__version__}", flush=True)
    model = make_model(config_1_4b())
    for cell in options.cells.split(","):
        for variant in options.pdl.split(","):
            run_cell(model, cell, options.outputs, copy, variant, profile=options.profile)


if __name__ == "__main__":
    main()
