"""The Triton kernels under Triton's interpreter: one by one against their twins, and whole rounds and
chunks against the CPU worker (tokens, exit depths and reasons equal, log-probabilities up to rounding).

In child processes, since the interpreter is chosen when triton is imported; all run at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
TIMEOUT = 1500  # seconds; two minutes on an idle machine
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]


@pytest.fixture(scope="module")
def children(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """By name: the process and the file that its output goes to."""
    root = HERE.parents[2]
    path = os.pathsep.join([str(root), str(root / "kernels"), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("children")
    started = {}
    for name, arguments in {
        "kernels": [*PYTEST, str(HERE / "interpreted_kernels.py")],
        "sampling": [*PYTEST, str(HERE / "interpreted_sampling.py")],
        "round": [str(HERE / "interpreted_round.py"), str(folder)],
    }.items():
        log = folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=root,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started[name] = (process, log)
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(TIMEOUT + 10)
@pytest.mark.parametrize(
    ("name", "proof"),
    [("kernels", " passed"), ("sampling", " passed"), ("round", "tokens of replayed requests")],
)
def test_interpreted(
    children: dict[str, tuple[subprocess.Popen[bytes], Path]], name: str, proof: str
) -> None:
    process, log = children[name]
    status = process.wait(TIMEOUT)
    said = log.read_text()
    assert status == 0, said
    assert proof in said
    assert "skipped" not in said
