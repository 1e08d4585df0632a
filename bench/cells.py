"""Cells of a GPU bench: one that fails is printed and the next one runs."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable

import torch


def attempt(name: str, run: Callable[[], None]) -> bool:
    """Run one cell and free its device memory. What it raises is printed, and the answer is False."""
    begin = time.monotonic()
    passed = True
    try:
        run()
    except Exception:
        passed = False
        print(f"{name} FAILED after {time.monotonic() - begin:.0f} s", flush=True)
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    gc.collect()
    torch.cuda.empty_cache()
    return passed


def run_all(cells: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Run every cell; exits with status 1 at the end if any failed."""
    failed = [name for name, run in cells if not attempt(name, run)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
