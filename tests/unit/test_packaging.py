"""What an installed package contains."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_of_the_source_is_installed() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for name, folder in setup["package-dir"].items():
        for file in (ROOT / folder).rglob("*.py"):
            found.add(".".join((name, *file.parent.relative_to(ROOT / folder).parts)))
    assert sorted(setup["packages"]) == sorted(found)
