"""A real server for end-to-end tests: three processes, started and stopped like a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_TIMEOUT = 200.0  # seconds; a start takes a few on an idle machine

# A proxy in the environment must not see requests to this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextlib.contextmanager
def held_port(port: int = 0) -> Iterator[int]:
    """A port (0: any that is free) that nobody else gets during the block.

    A socket that is bound but does not listen keeps the kernel from handing the port out, be it to a
    server or to a client's end of a connection. Servers set SO_REUSEADDR and may listen there.

    Raises:
        OSError: the port is in use.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port))
        yield int(holder.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is read
        return False


def children_of(pid: int) -> set[int]:
    """Process ids of the children; none of a process that has ended."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                found |= set(map(int, (task / "children").read_text().split()))
    return found


@dataclass(frozen=True)
class Answer:
    """Status and body of one HTTP answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, *, timeout: float = 200.0) -> Answer:
        return self._send(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, payload: Any = None, *, timeout: float = 200.0) -> Answer:
        body = json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        return self._send(urllib.request.Request(self.url + path, body, headers), timeout)

    def generate(self, text: str | list[str], **sampling: Any) -> Any:
        """POST /generate that must succeed; the answer as JSON."""
        answer = self.post("/generate", {"text": text, "sampling_params": sampling})
        assert answer.status == 200, answer.body
        return answer.json()

    @staticmethod
    def _send(request: urllib.request.Request, timeout: float) -> Answer:
        try:
            with _opener.open(request, timeout=timeout) as response:
                return Answer(response.status, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read())

    def is_ready(self) -> bool:
        try:
            return self.get("/health", timeout=5.0).status == 200
        except OSError:
            return False

    def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            code = self.process.poll()
            assert code is None, f"the server ended with {code}:\n{self.log()}"
            assert time.monotonic() < deadline, f"not ready after {timeout} s:\n{self.log()}"
            time.sleep(0.05)

    def stop(self, timeout: float = 100.0) -> int:
        """SIGTERM, then the exit code; a server that does not end is killed and fails the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop within {timeout} s:\n{self.log()}") from None


@contextlib.contextmanager
def start_server(
    model: Path | str | None, *flags: str, command: list[str] | None = None, port: int = 0
) -> Iterator[Server]:
    """Start a server without waiting for it; it is stopped at the end of the block.

    Args:
        model: checkpoint folder; None for the bundled model.
        flags: further flags of the command line.
        command: words before the flags, instead of ``python -m ouro_sgl.launch_server``.
        port: where it listens; 0: at any port.
    """
    words = command or [sys.executable, "-m", "ouro_sgl.launch_server"]
    with held_port(port) as held, tempfile.TemporaryDirectory() as folder:
        words = [*words, "--port", str(held), *flags]
        if model is not None:
            words += ["--model-path", str(model)]
        log_file = Path(folder) / "log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ.copy()
            )
        server = Server(f"http://127.0.0.1:{held}", process, log_file)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def running_server(
    model: Path | str | None, *flags: str, command: list[str] | None = None
) -> Iterator[Server]:
    """A server that answers; see :func:`start_server`."""
    with start_server(model, *flags, command=command) as server:
        server.wait_ready()
        yield server
