"""SGLang's two launch commands, handed over to this server when the checkpoint is an Ouro one.

- ``sglang serve``: entry point ``sglang.serve_backends`` -> :func:`serve_backend`.
- ``python -m sglang.launch_server``: entry point ``sglang.srt.plugins`` -> :func:`register_hooks`.

SGLang loads this file for every model that it serves, also in its own child processes, so the
functions import on use and any other model passes through untouched. Handing over means replacing
the process: SGLang has loaded torch by then, which the frontend must not carry.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

MODEL_FLAGS = ("--model-path", "--model")


def serve_backend() -> Any:
    """The backend ``ouro`` of ``sglang serve`` (also reached by ``--model-type ouro``)."""
    from sglang.cli.serve_backends import SERVE_BACKEND_API_VERSION, ServeBackend, ServeBackendDetection

    answers = {
        True: ServeBackendDetection.MATCH,
        False: ServeBackendDetection.NO_MATCH,
        None: ServeBackendDetection.UNKNOWN,
    }
    return ServeBackend(
        api_version=SERVE_BACKEND_API_VERSION,
        run=lambda request: launch(request.argv),
        detect=lambda request: answers[is_ouro(request.model_path, flag_value(request.argv, "--revision"))],
        requires_model_path=False,  # without one the bundled model is served
    )


def register_hooks() -> None:
    """Look at the model before SGLang parses its arguments."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.prepare_server_args", _around_parsing, HookType.AROUND)


def _around_parsing(original: Callable[[list[str]], Any], argv: list[str]) -> Any:
    if is_ouro(flag_value(argv, *MODEL_FLAGS), flag_value(argv, "--revision")):
        launch(argv)
    return original(argv)


def flag_value(argv: Sequence[str], *flags: str) -> str | None:
    """The value of the last of ``flags`` in a command line (``--flag value`` or ``--flag=value``)."""
    value = None
    for index, word in enumerate(argv):
        name, equals, rest = word.partition("=")
        if name in flags:
            value = rest if equals else argv[index + 1] if index + 1 < len(argv) else None
    return value


def is_ouro(model_path: str | None, revision: str | None = None) -> bool | None:
    """Whether a local folder or hub name holds an Ouro checkpoint; None if that cannot be known."""
    if model_path is None:
        return None
    folder = Path(model_path).expanduser()
    file = folder / "config.json" if folder.is_dir() else _fetch_config(model_path, revision)
    if file is None:
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # not ours to complain: SGLang reports what is wrong with the folder
    return isinstance(config, dict) and config.get("model_type") == "ouro"


def _fetch_config(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:
        # Whatever it is (no network, no such name, a login): SGLang meets it next and reports it.
        logger.info("config.json of %s is out of reach: %s", name, error)
        return None


def launch(argv: Sequence[str]) -> NoReturn:
    """Replace this process by the server, with the command line as it was given."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "ouro_sgl.launch_server", *argv])
