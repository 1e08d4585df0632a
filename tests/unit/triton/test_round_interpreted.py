"""The CUDA round's kernels under Triton's interpreter, whole, against the CPU round.

Runs in a child process, since the interpreter is chosen when triton is imported. Tokens, exit
depths and reasons must agree; log-probabilities up to rounding.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(400)
def test_rounds_agree_with_the_cpu(tmp_path: Path) -> None:
    script = Path(__file__).with_name("interpreted_round.py")
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([root, f"{root}/kernels", *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens of replayed requests" in done.stdout
