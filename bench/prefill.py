"""Prefill through the worker's real loop, as a share of 790 TFLOP/s (a large bf16 matrix product).

    python -m bench.prefill [--contexts 1024,4096,16384] [--profile]

Needs a CUDA device. One row at a time with chunks of ``--chunk`` tokens; rows are repeated so that
at least 32K tokens are timed. The first pass warms up.
"""

from __future__ import annotations

import argparse
import gc

import torch

from bench.gpu import Bench, config_1_4b, make_model
from ouro_sgl.models.config import OuroConfig

PEAK = 790e12


def flops(config: OuroConfig, context: int) -> float:
    """Of one prompt: every product of all loops, and causal attention."""
    heads = config.num_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size
    per_token = 2 * layer * config.num_layers
    attention = 2 * 2 * heads * config.num_layers * context / 2
    return config.total_loops * context * (per_token + attention)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default="1024,4096,16384")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    model = make_model(config_1_4b())
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, chunks of {options.chunk}", flush=True
    )
    for context in map(int, options.contexts.split(",")):
        rows = max(2, 32768 // context)
        depths = [[4]] * rows
        Bench(model, min(rows, 2), context, 1, max_chunk=options.chunk).prefill(depths)  # warm up
        gc.collect()
        torch.cuda.empty_cache()
        bench = Bench(model, rows, context, 1, max_chunk=options.chunk)
        if options.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                seconds = bench.prefill(depths)
        else:
            seconds = bench.prefill(depths)
        rate = rows * flops(model.config, context) / seconds
        print(
            f"{context}: {rows * context / seconds:.0f} tok/s, {rate / 1e12:.0f} TFLOP/s, "
            f"{rate / PEAK:.0%} of 790",
            flush=True,
        )
        if options.profile:
            for row in sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)[:10]:
                print(f"    {row.device_time_total / 1e3:8.1f} ms  {row.count:6d} x {row.key[:70]}")
        print(f"    row counts {bench.worker._executor.prefill_row_counts}")
        del bench
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
