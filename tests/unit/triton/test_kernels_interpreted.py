"""The Triton kernels one by one under Triton's interpreter.

In a child process, since the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["interpreted_kernels.py", "interpreted_sampling.py"])
def test_kernels_agree_with_their_twins(name: str) -> None:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(root / "kernels"), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name(name))],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
