"""Decode rounds against their byte floor, through the worker's real loop.

    python -m bench.rounds [--cells 1024x1,1024x32] [--outputs 24] [--pdl on,off] [--ahead-rows 128,16,0]
                           [--profile] [--beside]

Needs a CUDA device. Depth is 4 for every token, prompts count as cached; a round's floor is its bytes
over the copy bandwidth measured in the same run. 6 cells take about 15 s beside start and compiling.
``--ahead-rows``: up to how many rows products ask for their weights ahead (cuda_round.AHEAD_ROWS).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial

import torch

from bench.attention import copy_bandwidth
from bench.cells import run_all
from bench.gpu import Bench, config_1_4b, filled_pool, make_model, round_bytes
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.worker import cuda_round

CELLS = "1024x1,1024x32,1024x128,4096x16,16384x4,65408x1"


def run_cell(
    model: OuroModel,
    cell: str,
    outputs: int,
    copy: float,
    pdl: str,
    ahead_rows: int,
    *,
    profile: bool,
    beside: bool,
) -> None:
    """Print one line for a cell, and with ``profile`` the time of each kernel and between rounds."""
    context, rows = map(int, cell.split("x"))
    cuda_round.AHEAD_ROWS = ahead_rows
    spare = 1 if beside else 0
    depths = [[4] * outputs for _ in range(rows + spare)]
    pool = filled_pool(model, (rows + spare) * (context + outputs) * model.config.total_loops)
    bench = Bench(model, rows, context, outputs, pdl=pdl == "on", spare=spare, pool=pool)
    bench.restart(depths)
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
        f"{cell} pdl {pdl}, ahead up to {ahead_rows}{' beside a prefill' if beside else ''}: "
        f"{per_round * 1e6:.0f} us per round, {floor / copy / per_round:.1%} of the floor "
        f"({floor / copy * 1e6:.0f} us)",
        flush=True,
    )
    if profile:
        gaps, length = between_rounds(profiler)
        print(f"    between rounds {gaps:.1f} us, {gaps / length:.1%} of the median round of {length:.0f} us")
        for row in sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)[:14]:
            total = row.device_time_total / rounds
            print(f"    {total:8.1f} us per round  {row.count / rounds:6.1f} x {row.key[:60]}")


def between_rounds(profiler: torch.profiler.profile) -> tuple[float, float]:
    """Medians in us: from one round's last kernel or copy to the next one's first, and of a whole round."""
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    stream = next(event.device_resource_id for event in events if event.name.startswith("begin_round"))
    mine = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_resource_id == stream
    )
    starts = [index for index, event in enumerate(mine) if event[2].startswith("begin_round") and index]
    gaps = [mine[index][0] - mine[index - 1][1] for index in starts]
    rounds = [mine[b][0] - mine[a][0] for a, b in itertools.pairwise(starts)]
    return statistics.median(gaps), statistics.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--outputs", type=int, default=24)
    parser.add_argument("--layers", type=int, default=24, help="24: the 1.4B shape; 48: 2.6B")
    parser.add_argument(
        "--pdl",
        default="on",
        choices=("on", "off", "on,off"),
        help="programmatic dependent launch",
    )
    parser.add_argument("--ahead-rows", default=str(cuda_round.AHEAD_ROWS))
    parser.add_argument(
        "--profile", action="store_true", help="print the time of each kernel and between rounds"
    )
    parser.add_argument("--beside", action="store_true", help="prefill one more prompt meanwhile")
    options = parser.parse_args()
    copy = copy_bandwidth()
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(0)
    print(f"copy {copy / 1e12:.2f} TB/s, {name}, torch {torch.__version__}", flush=True)
    model = make_model(config_1_4b(options.layers))
    run = partial(run_cell, model, copy=copy, profile=options.profile, beside=options.beside)
    run_all(
        (
            f"{cell} pdl {pdl}, ahead up to {ahead_rows}",
            partial(run, cell=cell, outputs=options.outputs, pdl=pdl, ahead_rows=int(ahead_rows)),
        )
        for cell in options.cells.split(",")
        for pdl in options.pdl.split(",")
        for ahead_rows in options.ahead_rows.split(",")
    )


if __name__ == "__main__":
    main()
