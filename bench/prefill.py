"""Prefill through the worker's real loop, as a share of 790 TFLOP/s (a large bf16 matrix product).

    python -m bench.prefill [--contexts 1024,4096,16384,65408] [--profile]

Needs a CUDA device. Chunks of ``--chunk`` tokens, as many prompts as 32K tokens hold. A prompt of up to
two chunks warms up.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from bench.cells import run_all
from bench.gpu import Bench, config_1_4b, make_model
from ouro_sgl.models.config import OuroConfig
from ouro_sgl.models.ouro import OuroModel

PEAK = 790e12


def flops(config: OuroConfig, context: int) -> float:
    """Of one prompt: every product of all loops, and causal attention."""
    heads = config.num_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size
    per_token = 2 * layer * config.num_layers
    attention = 2 * 2 * heads * config.num_layers * context / 2
    return config.total_loops * context * (per_token + attention)


def run_cell(model: OuroModel, context: int, chunk: int, *, profile: bool) -> None:
    rows = max(1, 32768 // context)
    depths = [[4]] * rows
    Bench(model, 1, min(context, 2 * chunk), 1, max_chunk=chunk).prefill(depths)  # warm up
    bench = Bench(model, rows, context, 1, max_chunk=chunk)
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            seconds = bench.prefill(depths)
    else:
        seconds = bench.prefill(depths)
    rate = rows * flops(model.config, context) / seconds
    print(
        f"{context}: {rows * context / seconds:.0f} tok/s, {seconds / rows * 1e3:.0f} ms per prompt, "
        f"{rate / 1e12:.0f} TFLOP/s, {rate / PEAK:.0%} of 790",
        flush=True,
    )
    if profile:
        for row in sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)[:10]:
            print(f"    {row.device_time_total / 1e3:8.1f} ms  {row.count:6d} x {row.key[:70]}")
    print(f"    row counts {bench.worker._executor.prefill_row_counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default="1024,4096,16384,65408")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    model = make_model(config_1_4b())
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, chunks of {options.chunk}", flush=True
    )
    run_all(
        (context, partial(run_cell, model, int(context), options.chunk, profile=options.profile))
        for context in options.contexts.split(",")
    )


if __name__ == "__main__":
    main()
