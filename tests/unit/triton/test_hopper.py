"""The kernels for Hopper where there is none: they compile, and without Gluon the others take their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = 227 * 1024  # bytes that a program can have on compute capability 9


def python(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_they_compile_fit_and_spill_nothing() -> None:
    lines = python(str(Path(__file__).with_name("compiled_kernels.py"))).splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 16
    for kernel in found:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert (kernel["spilled"], kernel["warnings"]) == (0, False), kernel


def test_without_gluon_the_triton_kernels_do_it_all() -> None:
    python(
        "-c",
        """
import sys
sys.modules["triton.experimental.gluon"] = None  # its import fails
import torch
import ouro_sgl.worker.cuda_prefill, ouro_sgl.worker.cuda_round
from ouro_kernels.triton_ops import hopper
assert hopper.products is hopper.chunk is hopper.prefill is None
torch.cuda.get_device_capability = lambda device: (9, 0)
assert not hopper.supported(torch.device("cuda"), torch.bfloat16)
""",
    )


def test_supported_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from ouro_kernels.triton_ops import hopper

    cuda = torch.device("cuda")
    for capability, good in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert hopper.supported(cuda, torch.bfloat16) is good
        assert hopper.supported(cuda, torch.float16) is good
        assert not hopper.supported(cuda, torch.float32)
    assert not hopper.supported(torch.device("cpu"), torch.bfloat16)
