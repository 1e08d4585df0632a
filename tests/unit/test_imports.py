"""Who may import what: only the worker loads torch, and the layers know only those below them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import ouro_sgl

PACKAGE = Path(ouro_sgl.__file__).parent
KERNELS = PACKAGE.parent / "kernels" / "ouro_kernels"

# SGLang's own package loads torch; these two files are the bridge to it, loaded only on demand.
KNOWS_SGLANG = {"ouro_sgl.sglang_plugin", "ouro_sgl.endpoint"}
# Importing a __main__ of a child process would run it.
TORCH_FREE_FOLDERS = ("frontend", "scheduler", "kvcache")
TORCH_FREE_MODELS = {"ouro_sgl.models.config", "ouro_sgl.models.hub"}


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def torch_free_modules() -> list[str]:
    files = list(PACKAGE.glob("*.py"))
    for folder in TORCH_FREE_FOLDERS:
        files += (PACKAGE / folder).rglob("*.py")
    names = {module_name(file) for file in files if file.name != "__main__.py"}
    return sorted((names | TORCH_FREE_MODELS) - KNOWS_SGLANG)


def loaded_after(statements: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after these statements."""
    code = f"import sys\n{statements}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    return set(done.stdout.split())


def imported(file: Path) -> set[str]:
    """Full names of what a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_frontend_scheduler_and_top_level_load_no_torch() -> None:
    modules = torch_free_modules()
    assert {"ouro_sgl.engine", "ouro_sgl.launch_server", "ouro_sgl.messages"} <= set(modules)
    loaded = loaded_after("\n".join(f"import {name}" for name in modules))
    assert "ouro_sgl" in loaded
    assert not loaded & {"torch", "triton", "transformers", "sglang", "numpy"}


def test_the_package_alone_loads_nothing_else() -> None:
    loaded = loaded_after("import ouro_sgl\nassert ouro_sgl.__version__")
    assert not loaded & {"torch", "zmq", "msgspec", "asyncio", "fastapi", "sglang"}


def test_worker_knows_neither_frontend_nor_scheduler() -> None:
    for file in (PACKAGE / "worker").rglob("*.py"):
        for name in imported(file):
            assert not name.startswith(("ouro_sgl.frontend", "ouro_sgl.scheduler", "ouro_sgl.kvcache")), (
                f"{file} imports {name}"
            )


def test_scheduler_and_frontend_know_each_other_only_by_messages() -> None:
    for one, other in (("scheduler", "frontend"), ("frontend", "scheduler")):
        for file in (PACKAGE / one).rglob("*.py"):
            for name in imported(file):
                assert not name.startswith((f"ouro_sgl.{other}", "ouro_sgl.worker")), f"{file} imports {name}"


def test_kernels_import_only_torch_and_triton() -> None:
    files = list(KERNELS.rglob("*.py"))
    assert files
    allowed = {"torch", "triton", "ouro_kernels"} | set(sys.stdlib_module_names)
    for file in files:
        for name in imported(file):
            assert name.split(".")[0] in allowed, f"{file} imports {name}"


def test_the_package_exports_lazily_and_nothing_else() -> None:
    assert ouro_sgl.Engine.__module__ == "ouro_sgl.engine"
    assert not hasattr(ouro_sgl, "nothing")
    assert set(ouro_sgl.__all__) == {"Engine", "RuntimeEndpoint", "__version__"}
