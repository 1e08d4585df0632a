"""What each switch of the stack gains: the full stack against the same stack without it, in one process.

    python -m bench.ablation [--cells 1024x1,1024x32] [--depths trace] [--switches graphs,overlap]

Needs a CUDA device. Each cell builds a worker per switch around one model and one K/V pool. A repeat of a
worker is the work of a closed loop with 128 outputs per request, cut to 16 to 32 outputs: C rows decode
while C * outputs / 128 prompts are prefilled beside. Its prompts count as cached, so that no time goes
into them. Workers run in turn, every second time in reverse; the ratio is the median over the repeats of
the output tokens per second with the switch to those without it. A switch "loses" below 0.98.

Switches: ``graphs``; ``overlap`` (4 rounds in flight, not 1); ``one_stream`` (chunks run between rounds,
not beside them); ``static`` (buffers; graphs need them, so that this compares two eager stacks);
``undelayed`` (a token leaves at the loop that lets it, not one loop later, as policies ouro and
ouro_delayed: here depths from a trace, as random weights have no gate worth the name). ``trace`` is depths
2, 3, 4 with 65, 30, 5 percent.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch

from bench.cells import run_all
from bench.gpu import Bench, config_1_4b, filled_pool, make_model
from ouro_sgl.models.ouro import OuroModel

CELLS = "1024x1,1024x32,1024x128,4096x16,16384x4"
CLOSED_LOOP_OUTPUTS = 128
LEAST = 0.98
# what a worker is built without, by the switch that is off
WITHOUT: dict[str, dict[str, object]] = {
    "graphs": {"graphs": False},
    "overlap": {"rounds_in_flight": 1},
    "one_stream": {"single_stream": False},
    "static": {"graphs": False, "static_buffers": False},
    "undelayed": {},
}


@dataclass
class Arm:
    """A worker, the depths of its tokens, and the tokens per second of its repeats."""

    bench: Bench
    depths: list[list[int]]
    rates: list[float]

    def repeat(self) -> None:
        self.bench.restart(self.depths)
        seconds, _, tokens = self.bench.decode(self.depths)
        self.rates.append(tokens / seconds)


def make_depths(kind: str, rows: int, outputs: int, delay: int, loops: int = 4) -> list[list[int]]:
    rng = random.Random(0)
    early = [rng.choices([2, 3, 4], [65, 30, 5], k=outputs - 1) for _ in range(rows)]
    if kind == "4":
        early = [[loops] * (outputs - 1) for _ in range(rows)]
    return [[loops, *(min(depth + delay, loops) for depth in row)] for row in early]


def run_cell(model: OuroModel, cell: str, depths: str, switches: list[str], seconds: float) -> None:
    begin = time.perf_counter()
    context, rows = map(int, cell.split("x"))
    outputs = max(16, min(32, CLOSED_LOOP_OUTPUTS // rows))
    spare = rows * outputs // CLOSED_LOOP_OUTPUTS
    slots = (rows + spare) * (context + outputs) * model.config.total_loops
    pool = filled_pool(model, slots)

    def arm(off: str | None) -> Arm:
        bench = Bench(model, rows, context, outputs, spare=spare, pool=pool, **WITHOUT.get(off, {}))
        return Arm(bench, make_depths(depths, rows + spare, outputs, int(off == "undelayed")), [])

    full = arm(None)
    arms = {name: arm(name) for name in switches}
    for each in (full, *arms.values()):
        each.repeat()
        each.rates.clear()
    built = time.perf_counter() - begin
    begin = time.perf_counter()
    repeats = 0
    while repeats < 2 or (time.perf_counter() - begin) * (repeats + 1) / repeats < seconds:
        order = [full, *arms.values()]
        for each in order if repeats % 2 else reversed(order):
            each.repeat()
        repeats += 1
    print(
        f"{cell} depths {depths}, {outputs} outputs, {spare} prompts beside, {repeats} repeats, "
        f"{built:.1f} s to build and {time.perf_counter() - begin:.1f} s to run",
        flush=True,
    )
    print(f"    {'full stack':20}{statistics.median(full.rates):9.1f} tok/s", flush=True)
    for name, without in arms.items():
        on = arms["graphs"] if name == "static" else full
        ratios = [a / b for a, b in zip(on.rates, without.rates, strict=True)]
        ratio = statistics.median(ratios)
        print(
            f"    {'without ' + name:20}{statistics.median(without.rates):9.1f} tok/s, gains {ratio:.3f} "
            f"({min(ratios):.3f} .. {max(ratios):.3f}){' LOSES' if ratio < LEAST else ''}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--depths", choices=("trace", "4"), default="trace")
    parser.add_argument("--switches", default=",".join(WITHOUT), help="static needs graphs")
    parser.add_argument("--seconds", type=float, default=8.0, help="per cell; two repeats always run")
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    switches = options.switches.split(",")
    if unknown := set(switches) - set(WITHOUT):
        parser.error(f"unknown switches: {', '.join(sorted(unknown))}")
    if "static" in switches and "graphs" not in switches:
        parser.error("static is compared with the stack without graphs: give both")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    model = make_model(config_1_4b(options.layers))
    run_all(
        (cell, partial(run_cell, model, cell, options.depths, switches, options.seconds))
        for cell in options.cells.split(",")
    )


if __name__ == "__main__":
    main()
