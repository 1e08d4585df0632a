"""Slots from free memory: the same when an engine is built again in one process, an error when too few."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.worker.build import build
from tests.models import rand_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CONTEXT, ROWS, LOOPS = 65536, 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 KiB per slot, so that the memory is less than all rows could use at once."""
    return rand_checkpoint(
        tmp_path_factory.mktemp("rand"),
        layers=8,
        hidden=512,
        intermediate=256,
        kv_heads=4,
        dtype="bfloat16",
        max_position=CONTEXT,
    )


def slots(folder: Path, **settings: object) -> int:
    """Of an engine that is gone when this returns; what it held may stay with the allocator."""
    args = ServerArgs(model_path=str(folder), device="cuda", max_running_requests=ROWS, **settings)
    worker, ready = build(args)
    del worker
    gc.collect()
    return ready.num_slots


def test_an_engine_built_again_has_the_same_slots(folder: Path) -> None:
    settings = {"mem_fraction_static": 0.1}
    first = slots(folder, **settings)
    assert first < CONTEXT * ROWS * LOOPS  # the memory is what limits
    assert torch.cuda.memory_reserved() > 0
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda")  # held by the allocator, not used
    assert slots(folder, **settings) == first
    assert slots(folder, mem_fraction_static=0.1, context_length=512) <= first


def test_too_little_memory_is_an_error_with_the_figures(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no memory is left for KV: .*--mem-fraction-static") as caught:
        slots(folder, mem_fraction_static=0.0001)
    figures = [float(figure) for figure in re.findall(r"([\d.]+) GiB", str(caught.value))]
    assert len(figures) == 6
    assert figures[1] == pytest.approx(torch.cuda.get_device_properties(0).total_memory / 2**30, abs=0.1)
