"""Compiles kernels that only a Hopper GPU can run, for it and without it; a line of JSON for each.

To be run alone: it puts a driver without a device into Triton, and no kernel is launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from ouro_kernels.triton_ops import attention, hopper_chunk, hopper_prefill, hopper_products
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gpu import config_1_4b
from ouro_sgl.worker.cuda_round import AHEAD_ROWS, choose_products, split_counts

PTXAS = Path(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
bf16 = partial(torch.empty, dtype=torch.bfloat16)


class NoDevice:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


compiled: list[Any] = []
run = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))


def report(name: str) -> None:
    """One line for what was compiled since the last one: bytes of shared memory, of spilled registers."""
    (kernel,) = compiled
    compiled.clear()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"], encoding="utf-8")
        command = [PTXAS, "-v", "--gpu-name=sm_90a", source, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [
        int(line.split(" bytes spill stores")[0].split()[-1])
        for line in said.splitlines()
        if "spill stores" in line
    ]
    facts = {"shared": kernel.metadata.shared, "spilled": sum(spilled), "warnings": "warning" in said}
    print(json.dumps({"name": name, **facts}), flush=True)


def products() -> None:
    """Those of a round, as it cuts them."""
    config = config_1_4b()
    hidden, inner, mixed = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    out_splits, down_splits = splits = split_counts(config)
    shape = SimpleNamespace(config=config, dtype=torch.bfloat16)
    for rows in (1, 32, AHEAD_ROWS):
        tiles = choose_products(shape, rows, splits)
        for name, tile, columns, width, count in (
            ("qkv", tiles.qkv, 3 * mixed, hidden, 1),
            ("out", tiles.out, hidden, mixed, out_splits),
            ("down", tiles.down, hidden, inner, down_splits),
        ):
            out = torch.empty(count, rows, columns, dtype=torch.bfloat16 if count == 1 else torch.float32)
            hopper_products.linear(bf16(rows, width), bf16(columns, width), out, tile, count, pdl=True)
            report(f"{name} of {rows} rows")
        gate_up = bf16(2 * inner, hidden)
        hopper_products.gate_up(bf16(rows, hidden), gate_up, bf16(rows, inner), tiles.gate_up, pdl=True)
        report(f"gate_up of {rows} rows")


def prefill() -> None:
    config = config_1_4b()
    gate_up = bf16(2 * config.intermediate_size, config.hidden_size)
    hopper_chunk.gate_up(bf16(4096, config.hidden_size), gate_up, 132)
    report("gate_up of a chunk")
    for head_dim, dtype in ((128, torch.bfloat16), (64, torch.float16)):
        query = torch.empty(4096, 16, head_dim, dtype=dtype)
        packed = torch.empty(8192, 16 * head_dim, dtype=dtype)
        tiles = hopper_products.describe(packed, [hopper_prefill.BLOCK_K, head_dim])
        blocks = torch.zeros(32, 5, dtype=torch.int32)
        hopper_prefill.prefill_attention(query, tiles, tiles, blocks, blocks[0, :1], query, 0.1, 16, 132)
        report(f"prefill attention, heads of {head_dim}")


def decode() -> None:
    keys, angles, out = bf16(100, 16, 128), bf16(100, 64), bf16(4, 16, 128)
    table = torch.zeros(8, 64, dtype=torch.int32)
    work = attention.WorkList(4, 4096, 16, 128, 66, torch.device("cpu"))
    attention.decode_attention(
        bf16(4, 6144), keys, keys, table, angles, angles, work, out, 0.1, pdl=True, early=True
    )
    report("decode attention")


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    products()
    prefill()
    decode()
