"""Exit 0 if this interpreter has what pyproject.toml asks for, else name the first lack and exit 1.

Usage: satisfied.py [extra ...]
"""

from __future__ import annotations

import sys
from pathlib import Path


def lack(extras: list[str]) -> str | None:
    """The first requirement that is not met, in words; None if all are."""
    try:
        import tomllib
        from importlib.metadata import PackageNotFoundError, version

        from packaging.requirements import Requirement
    except ImportError:
        return "Python 3.11 or newer with packaging"
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    for line in wanted:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            return line
        if not requirement.specifier.contains(found, prereleases=True):
            return f"{line} (found {found})"
    return None


if __name__ == "__main__":
    missing = lack(sys.argv[1:])
    if missing is not None:
        sys.exit(f"{sys.executable} lacks {missing}")
