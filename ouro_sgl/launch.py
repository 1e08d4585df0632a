"""Checks before the start, and the life of the two child processes.

The parent (the frontend, or a program that uses ``Engine``) makes a private directory for the
sockets, writes the settings into it and starts ``ouro_sgl.scheduler`` and ``ouro_sgl.worker``. A
child ends when it is told to over its socket, or when its standard input reaches the end: the
parent holds the other end of that pipe, so no child outlives it, however it dies.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.hub import resolve_checkpoint

PACKAGE = Path(__file__).resolve().parent
BUNDLED_MODEL = PACKAGE / "assets" / "ouro-tiny"
CONFIG_FILE = "config.json"  # in the private directory: ServerArgs as JSON
CHILDREN = ("scheduler", "worker")

# A Unix socket's path has at most 107 bytes; the longest name in the directory has 18.
MAX_DIR_BYTES = 107 - 1 - 18


def resolve(args: ServerArgs) -> ServerArgs:
    """Settings with the checkpoint found and looked at; may fetch it from the hub.

    In the result ``model_path`` and ``tokenizer_path`` are folders, ``served_model_name`` is set and
    every setting but the memory's agrees with the checkpoint (the worker sizes the memory).

    Raises:
        ConfigError: there is no such checkpoint, it is not one that is served, it lacks its
            tokenizer, or a setting does not fit it.
    """
    folder = resolve_checkpoint(args.model_path, args.revision) if args.model_path else BUNDLED_MODEL
    name = args.served_model_name or args.model_path or BUNDLED_MODEL.name
    model = load_config(folder)
    tokenizer = Path(args.tokenizer_path).expanduser().absolute() if args.tokenizer_path else folder
    if not os.path.isfile(tokenizer / "tokenizer.json"):  # Path.is_file raises where a name is too long
        raise ConfigError(f"{tokenizer} holds no tokenizer.json")
    _check_against_model(args, model, folder)
    chunk = args.chunked_prefill_size
    if chunk == -1:
        chunk = args.context_length or model.max_position
    return replace(
        args,
        chunked_prefill_size=chunk,
        record_exit_trace=_check_record(args),
        model_path=str(folder),
        tokenizer_path=str(tokenizer),
        revision=None,
        served_model_name=name,
    )


def _check_against_model(args: ServerArgs, model: OuroConfig, folder: Path) -> None:
    if args.context_length is not None and args.context_length > model.max_position:
        raise ConfigError(
            f"--context-length {args.context_length} is above the model's {model.max_position} positions"
        )
    loops = model.total_loops
    for flag, value in (
        ("--default-min-loops", args.default_min_loops),
        ("--default-max-loops", args.default_max_loops),
    ):
        if value is not None and value > loops:
            raise ConfigError(f"{flag} {value} is above the model's {loops} loops")
    if args.exit_mode == "lookahead" and not (folder / "lookahead.safetensors").is_file():
        raise ConfigError(
            f"--exit-mode lookahead needs a trained head, but {folder} has no lookahead.safetensors"
        )
    if args.chat_template is not None and not os.path.isfile(args.chat_template):
        raise ConfigError(f"--chat-template {args.chat_template} is not a file")


def _check_record(args: ServerArgs) -> str | None:
    """The file that ``record_exit_trace`` comes to, links followed.

    It is written at shutdown, when it would be too late to say that it cannot be: a draft beside it, which
    then takes its name. That of a pipe or a device would be lost to all who use it.
    """
    if args.record_exit_trace is None:
        return None
    try:
        record = Path(os.path.realpath(args.record_exit_trace))
        # named as the draft will be, as a name can be too long
        with tempfile.NamedTemporaryFile(dir=record.parent, prefix=f"{record.name}.", suffix=".tmp"):
            usable = record.is_file() or not record.exists()
        same = args.exit_trace is not None and record == Path(os.path.realpath(args.exit_trace))
    except (OSError, ValueError):  # ValueError: NUL, half a character
        usable = same = False
    if not usable:
        raise ConfigError(f"--record-exit-trace {args.record_exit_trace} is not a file that can be written")
    if same:
        raise ConfigError(f"--exit-trace and --record-exit-trace name the same file {str(record)!r}")
    return str(record)


def check_port(host: str, port: int) -> None:
    """Raises :class:`ConfigError` when the server could not listen on ``host:port``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {error}") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As the server does, so that a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = f"port {port} on {host} is in use; choose another one with --port"
            else:
                message = f"cannot listen on {host} port {port}: {error.strerror}"
            raise ConfigError(message) from None


def make_private_dir() -> Path:
    """A new directory of mode 0700 whose path leaves room for the names of the sockets."""
    for base in (None, "/tmp"):
        path = Path(tempfile.mkdtemp(prefix="ouro_sgl-", dir=base))
        if len(os.fsencode(path)) <= MAX_DIR_BYTES:
            return path
        path.rmdir()
    raise ConfigError(
        "the path of the temporary directory is too long for Unix sockets: set a shorter TMPDIR"
    )


def child_environment() -> dict[str, str]:
    """The environment in which a child finds the same package as this process, installed or not."""
    paths = [str(PACKAGE.parent)]
    if (PACKAGE.parent / "kernels" / "ouro_kernels").is_dir():
        paths.append(str(PACKAGE.parent / "kernels"))
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])])}


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Processes:
    """The scheduler and the worker of one server, and the directory of their sockets."""

    def __init__(self, args: ServerArgs) -> None:
        """Start both children. ``args`` come from :func:`resolve`.

        Raises:
            ConfigError: no usable directory for the sockets.
            OSError: a child cannot be started.
        """
        self.ipc_dir = make_private_dir()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        try:
            # The children do not need the key, so it is not written anywhere.
            settings = msgspec.json.encode(replace(args, api_key=None))
            (self.ipc_dir / CONFIG_FILE).write_bytes(settings)
            for name in CHILDREN:
                self._children[name] = self._start(name)
        except BaseException:
            self.shutdown(timeout=0)
            raise

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: a file in the current directory must not hide a module of the same name.
            [sys.executable, "-P", "-m", f"ouro_sgl.{name}", str(self.ipc_dir)],
            stdin=subprocess.PIPE,  # never written; its end tells the child that the parent is gone
            stdout=2,  # standard output belongs to the program that uses the server
            env=child_environment(),
            process_group=0,  # Ctrl-C reaches the parent alone, which shuts down in order
        )

    def pids(self) -> dict[str, int]:
        """Process ids by child name."""
        return {name: child.pid for name, child in self._children.items()}

    def poll(self) -> str | None:
        """Which child is dead and how it ended; None while all live. Never blocks."""
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                return f"the {name} process {_describe_exit(code)}"
        return None

    def kill(self) -> None:
        """Leave the children no more time; :meth:`shutdown` must follow, or be under way."""
        for child in self._children.values():
            child.kill()

    def shutdown(self, timeout: float) -> None:
        """End the children and remove the directory; may be called twice.

        Args:
            timeout: seconds that they get to end by themselves. It only makes sense above 0 when
                they were told to (``ShutdownReq``).
        """
        self._wait(timeout)
        for child in self._children.values():
            if child.stdin is not None:
                child.stdin.close()
            if child.poll() is None:
                child.terminate()
        self._wait(2.0)
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
        shutil.rmtree(self.ipc_dir, ignore_errors=True)

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(child.poll() is None for child in self._children.values()):
            time.sleep(0.01)
