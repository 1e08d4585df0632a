"""What the frontend process costs: HTTP, tokenizing, detokenizing, streaming. No model.

    python bench/frontend.py [--seconds 5] [--profile FILE]

A mock scheduler answers over the real sockets. The frontend runs on one core; load generator and mock
share another one. Reports

1. requests per second: 16 output tokens, 64 connections, not streamed;
2. streamed tokens per second: 256 streams, one token every 10 ms each;

each with the frontend's CPU time, and its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers, trainers

from ouro_sgl.config import ServerArgs

VOCAB_SIZE = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MOCK = Path(__file__).with_name("mock_scheduler.py")


@dataclass
class Load:
    """One measurement."""

    name: str
    connections: int
    output_tokens: int
    round_ms: float
    stream: bool


LOADS = (
    Load("requests", connections=64, output_tokens=16, round_ms=0.5, stream=False),
    Load("streams", connections=256, output_tokens=128, round_ms=10.0, stream=True),
)


@dataclass
class Result:
    requests: int
    seconds: float
    cpu_seconds: float
    chunks: int
    rss_mib: float


# --------------------------------------------------------------------------- fixture


def made_up_words(count: int) -> list[str]:
    rng = random.Random(0)
    parts = ["ka", "lo", "mi", "ren", "tu", "sal", "ve", "dor", "in", "est", "qua", "phi", "o", "ber"]
    return ["".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(count)]


def write_checkpoint(folder: Path) -> None:
    """A byte-level BPE tokenizer of a realistic size, and the configuration that goes with it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(made_up_words(200_000))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "ouro",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 65536,
        "total_ut_steps": 4,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))


# --------------------------------------------------------------------------- the process under test


def frontend_main(settings: Path, ipc_dir: Path, profile: Path | None) -> None:
    from ouro_sgl.frontend.server import serve

    args = msgspec.json.decode(settings.read_bytes(), type=ServerArgs)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profile is None:
            runner.run(serve(args, ipc_dir, lambda: None))
            return
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(runner.run, serve(args, ipc_dir, lambda: None))
        profiler.dump_stats(profile)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(folder: Path, load: Load, cores: list[int], profile: Path | None) -> Iterator[tuple[int, int]]:
    """Frontend and mock scheduler; (port, process id of the frontend)."""
    port = free_port()
    args = ServerArgs(model_path=str(folder), served_model_name="mock", port=port)
    with tempfile.TemporaryDirectory(prefix="ouro") as name:
        settings = Path(name) / "settings.json"
        settings.write_bytes(msgspec.json.encode(args))
        command = [sys.executable, __file__, "--frontend", str(settings), name]
        if profile is not None:
            command += ["--profile", f"{profile}.{load.name}"]
        frontend = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(frontend.pid, cores[:1])
        mock = subprocess.Popen([sys.executable, str(MOCK), name, str(VOCAB_SIZE), str(load.round_ms)])
        os.sched_setaffinity(mock.pid, cores[-1:])
        try:
            assert frontend.stdout is not None
            line = frontend.stdout.readline()
            if "ready" not in line:
                raise RuntimeError(f"the frontend did not start: {line!r}")
            yield port, frontend.pid
        finally:
            frontend.terminate()
            frontend.wait(20)
            mock.wait(20)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


# --------------------------------------------------------------------------- load generator


class Connection(asyncio.Protocol):
    """Sends one request after the other and looks at as little of the answers as possible."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._buffer = b""
        self._wanted: int | None = None  # bytes of the answer that is coming in, if known

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._buffer, self._wanted = b"", None
        self._transport.write(self._generator.next_request())

    def data_received(self, data: bytes) -> None:
        generator = self._generator
        if generator.load.stream:
            generator.chunks += data.count(b"data: {")
            # The end marker may be cut in two.
            if b"[DONE]" not in (self._buffer + data[-256:])[-512:]:
                self._buffer = data[-256:]
                return
        else:
            self._buffer += data
            if self._wanted is None:
                head, separator, _ = self._buffer.partition(b"\r\n\r\n")
                if not separator:
                    return
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(head.decode())
                length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                self._wanted = len(head) + 4 + int(length)
            if len(self._buffer) < self._wanted:
                return
        if generator.finished():
            self._send()


class Generator:
    def __init__(self, load: Load, port: int) -> None:
        self.load = load
        self.chunks = 0
        self.completed = 0
        self._port = port
        words = made_up_words(5000)
        self._requests = [self._encode(" ".join(words[i : i + 20])) for i in range(0, 4000, 20)]
        self._next = 0
        self._target: int | None = None
        self._open = 0
        self._done = asyncio.Event()

    def _encode(self, text: str) -> bytes:
        params = {"max_new_tokens": self.load.output_tokens, "temperature": 0.7, "top_p": 0.9}
        body: dict[str, Any] = {"text": text, "sampling_params": params, "stream": self.load.stream}
        data = json.dumps(body).encode()
        head = (
            "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def next_request(self) -> bytes:
        self._next += 1
        return self._requests[self._next % len(self._requests)]

    def finished(self) -> bool:
        """One answer is complete; whether the connection goes on."""
        self.completed += 1
        if self._target is not None and self._next >= self._target:
            self._open -= 1
            if not self._open:
                self._done.set()
            return False
        return True

    async def run(self, pid: int, seconds: float) -> Result:
        """Load the server for about ``seconds``, then let the last answers come in."""
        loop = asyncio.get_running_loop()
        cpu, start = cpu_seconds(pid), time.perf_counter()
        self._open = self.load.connections
        for _ in range(self.load.connections):
            await loop.create_connection(lambda: Connection(self), "127.0.0.1", self._port)
        await asyncio.sleep(seconds)
        self._target = self._next
        async with asyncio.timeout(60):
            await self._done.wait()
        duration = time.perf_counter() - start
        return Result(self.completed, duration, cpu_seconds(pid) - cpu, self.chunks, rss_mib(pid))


def measure(folder: Path, load: Load, cores: list[int], seconds: float, profile: Path | None) -> Result:
    with (
        running(folder, load, cores, profile) as (port, pid),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):

        async def warmed_up() -> Result:
            await Generator(load, port).run(pid, 1.0)
            return await Generator(load, port).run(pid, seconds)

        return runner.run(warmed_up())


def report(load: Load, result: Result) -> str:
    tokens = result.requests * load.output_tokens
    rate = result.requests / result.seconds
    line = (
        f"{load.name}: {load.connections} connections, {load.output_tokens} tokens: {rate:.0f} requests/s, "
    )
    line += f"{tokens / result.seconds:.0f} tokens/s"
    if load.stream:
        line += f" in {result.chunks / result.seconds:.0f} chunks/s"
    line += (
        f"; frontend CPU {1e6 * result.cpu_seconds / result.requests:.0f} us/request, "
        f"{1e6 * result.cpu_seconds / tokens:.1f} us/token, "
        f"{100 * result.cpu_seconds / result.seconds:.0f} % of a core; RSS {result.rss_mib:.0f} MiB"
    )
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--profile", type=Path, help="write cProfile statistics to FILE.<load>")
    parser.add_argument("--only", choices=[load.name for load in LOADS])
    parser.add_argument("--frontend", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.frontend is not None:
        frontend_main(*options.frontend, options.profile)
        return
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ouro") as name:
        folder = Path(name)
        write_checkpoint(folder)
        os.sched_setaffinity(0, cores[-1:])
        for load in LOADS:
            if options.only in (None, load.name):
                result = measure(folder, load, cores, options.seconds, options.profile)
                print(report(load, result), flush=True)


if __name__ == "__main__":
    main()
