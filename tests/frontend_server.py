"""A frontend process in front of a :class:`MockScheduler`: real HTTP, real sockets, no model.

As a program (``python frontend_server.py <settings.json> <directory of the sockets>``) it is that
process; as a module it holds the checkpoint and the context manager that start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
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
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ouro_sgl.config import ServerArgs

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# One more than the tokenizer has: an id that the model knows and the tokenizer does not.
VOCAB_SIZE = len(SPECIAL) + 256 + 3


def byte_tokenizer(words: tuple[str, ...] = ("Paris", "world")) -> tokenizers.Tokenizer:
    """Byte-level, ids 0..2 special, 3..258 the bytes in order, then ``words`` as single tokens."""
    alphabet = dict(zip(_byte_order(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab |= {alphabet[byte]: 3 + byte for byte in range(256)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _byte_order() -> list[int]:
    """The byte of each character of the sorted byte-level alphabet."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return shown + [byte for byte in range(256) if byte not in shown]


def write_checkpoint(folder: Path, vocab_size: int = 320) -> Path:
    """Everything of a checkpoint that the frontend reads."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "model_type": "ouro",
        "architectures": ["OuroForCausalLM"],
        "vocab_size": vocab_size,
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Frontend:
    process: subprocess.Popen[str]
    url: str
    ipc_dir: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def wait_healthy(self, status: int = 200) -> None:
        deadline = time.monotonic() + 30
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
    port = free_port()
    args = ServerArgs(model_path=str(folder), served_model_name="echo", port=port, **settings)
    with tempfile.TemporaryDirectory(prefix="ouro") as name:
        ipc_dir = Path(name)
        (ipc_dir / "settings.json").write_bytes(msgspec.json.encode(args))
        process = subprocess.Popen(
            [sys.executable, __file__, str(ipc_dir / "settings.json"), name],
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


def main() -> int:
    import uvloop

    from ouro_sgl.frontend.server import serve

    args = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ServerArgs)
    ipc_dir = Path(sys.argv[2])
    dead = ipc_dir / "child-died"  # a test makes this file to play the death of a child

    def children() -> str | None:
        return dead.read_text() if dead.exists() else None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(args, ipc_dir, children))


if __name__ == "__main__":
    sys.exit(main())
