"""A frontend process for a :class:`MockScheduler` to answer: real HTTP, real sockets, no model."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tokenizers import Tokenizer

from ouro_sgl.config import ServerArgs
from tests.models import byte_tokenizer
from tests.server import held_port

WORDS = ("Paris", "world")  # single tokens of the echo checkpoint
VOCAB_SIZE = 320  # more than its tokenizer knows
PROCESS = Path(__file__).with_name("frontend_process.py")


def write_echo_checkpoint(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Everything of a checkpoint that the frontend reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer(WORDS)).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "model_type": "ouro",
        "architectures": ["OuroForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 256,
        "total_ut_steps": 4,
        "early_exit_threshold": 0.9,
        "eos_token_id": [0, 2],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Frontend:
    process: subprocess.Popen[str]
    url: str
    ipc_dir: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=100, trust_env=False)

    def lose_child(self, how: str) -> None:
        """Play the death of a child; ``how`` tells what happened to it."""
        whole = self.ipc_dir / "child-died.part"
        whole.write_text(how)
        whole.rename(self.ipc_dir / "child-died")  # nobody sees the half of it

    def wait_healthy(self, status: int = 200) -> None:
        deadline = time.monotonic() + 100
        with self.client() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == status:
                        return
                assert self.process.poll() is None, "the frontend ended"
                assert time.monotonic() < deadline, "the frontend does not get ready"
                time.sleep(0.02)


@contextlib.contextmanager
def running_frontend(folder: Path, **settings: Any) -> Iterator[Frontend]:
    """Start a frontend on a free port; the caller runs the scheduler on ``ipc_dir``."""
    with held_port() as port, tempfile.TemporaryDirectory(prefix="ouro") as name:
        args = ServerArgs(model_path=str(folder), served_model_name="echo", port=port, **settings)
        ipc_dir = Path(name)
        (ipc_dir / "settings.json").write_bytes(msgspec.json.encode(args))
        process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(ipc_dir / "settings.json"), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield Frontend(process, f"http://127.0.0.1:{port}", ipc_dir)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
