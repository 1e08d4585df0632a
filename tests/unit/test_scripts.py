"""The scripts' ground: pinned versions that satisfy pyproject.toml, and the choice of interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def load_satisfied(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("satisfied", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_pins_everything_at_a_version_that_satisfies_the_project() -> None:
    lines = [
        line.strip()
        for line in (ROOT / "scripts" / "requirements.lock").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert all("==" in line and "/" not in line for line in lines)
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


@pytest.mark.parametrize(
    ("dependencies", "lack"),
    [
        (["pytest"], None),
        (["pytest>=8", "no-such-package; python_version < '3'"], None),
        (["pytest", "no-such-package>=1"], "no-such-package>=1"),
        (["pytest>=9999"], "pytest>=9999"),
    ],
)
def test_an_interpreter_is_taken_only_if_nothing_is_missing(
    tmp_path: Path, dependencies: list[str], lack: str | None
) -> None:
    script = tmp_path / "scripts" / "satisfied.py"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts" / "satisfied.py").read_text())
    listed = ", ".join(f'"{text}"' for text in dependencies)
    (tmp_path / "pyproject.toml").write_text(
        f"[project]\ndependencies = [{listed}]\n[project.optional-dependencies]\nmore = ['absent-package']\n"
    )
    module = load_satisfied(script)
    found = module.lack([])
    assert (found is None) if lack is None else found.startswith(lack)
    if lack is None:
        assert module.lack(["more"]) == "absent-package"


def test_the_scripts_use_the_interpreter_that_runs_these_tests() -> None:
    code = 'source scripts/environment.sh; use_python; "$PYTHON" -c "import sys; print(sys.prefix)"'
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.prefix
