"""Decode rounds against their byte floor, through the worker's real loop.

    python -m bench.rounds [--cells 1024x1,1024x32] [--outputs 24] [--profile]

Needs a CUDA device. Depth is 4 for every token; a round's floor is its bytes over the copy bandwidth
measured in the same run.
"""

from __future__ import annotations

import argparse
import gc

import torch

from bench.attention import copy_bandwidth
from bench.gpu import Bench, config_1_4b, make_model, round_bytes

CELLS = "1024x1,1024x32,1024x128,4096x16,16384x4,65408x1"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--outputs", type=int, default=24)
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    options = parser.parse_args()
    copy = copy_bandwidth()
    torch.cuda.empty_cache()
    print(
        f"copy {copy / 1e12:.2f} TB/s, {torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True
    )
    model = make_model(config_1_4b())
    for cell in options.cells.split(","):
        context, rows = map(int, cell.split("x"))
        depths = [[4] * options.outputs for _ in range(rows)]
        bench = Bench(model, rows, context, options.outputs, pdl=not options.no_pdl)
        prefill = bench.prefill(depths)
        if options.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                seconds, rounds, _ = bench.decode(depths)
        else:
            seconds, rounds, _ = bench.decode(depths)
        floor = round_bytes(model.config, [context + options.outputs // 2] * rows, coda=False)
        floor += (model.config.vocab_size * model.config.hidden_size * 2) // 4
        per_round = seconds / rounds
        print(
            f"{cell}: {per_round * 1e6:.0f} us per round, {floor / copy / per_round:.0%} of the floor "
            f"({floor / copy * 1e6:.0f} us), prefill {rows * context / prefill:.0f} tok/s",
            flush=True,
        )
        if options.profile:
            averages = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
            for row in averages[:14]:
                total = row.device_time_total / rounds
                print(f"    {total:8.1f} us per round  {row.count / rounds:6.1f} x {row.key[:60]}")
        del bench
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
