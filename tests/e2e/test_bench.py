"""The benches that need neither a GPU nor minutes run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_frontend() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.frontend", "--seconds", "0.5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for line in ("requests", "streams"):
        figure = re.search(rf"^{line}: .* (\d+) tokens/s", done.stdout, re.MULTILINE)
        assert figure is not None, done.stdout
        assert int(figure[1]) > 0
