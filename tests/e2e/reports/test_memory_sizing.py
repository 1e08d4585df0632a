"""Reported faults of memory: how much is taken, whether it comes back, what happens with too little."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ouro_sgl import Engine
from tests.e2e.reports.conftest import Serve
from tests.e2e.reports.support import LONG, NATIVE, digits, greedy, resident_bytes, wait_for
from tests.models import byte_ids, byte_tokenizer, raw_config, write_checkpoint
from tests.server import start_server

REFUSAL_SECONDS = 200.0
LEFT_BEHIND = 200 << 20  # bytes of resident memory that may stay


def test_mem_03_engines_come_and_go(ouro_model: Path, script_model: Path) -> None:
    """Three in a row in one program, another one beside them for a while; two answer side by side."""
    settings: dict[str, Any] = {"num_slots": 4096, "max_running_requests": 4}
    sizes, answers = [], []
    children = set(psutil.Process().children())
    resident = 0

    def serve_beside(found: list[str]) -> None:
        with Engine(script_model, **settings) as other:
            texts = [other.generate(LONG, greedy(6))["text"] for _ in range(20)]
            found.extend(texts)

    found: list[str] = []
    for turn in range(3):
        beside = threading.Thread(target=serve_beside, args=(found,))
        if turn == 1:
            beside.start()
        engine = Engine(ouro_model, **settings)
        info = engine.get_server_info()
        sizes.append((engine.served_length, info["num_slots"], info["free_slots"]))
        answers.append([engine.generate("hello", greedy(8))["output_ids"] for _ in range(5)])
        if turn == 1:
            beside.join(200)
            assert not beside.is_alive()
        engine.shutdown()
        del engine
        if turn == 0:
            resident = resident_bytes(os.getpid())
    assert found == [digits(6)] * 20
    assert len(set(sizes)) == 1
    assert answers[0] == answers[1] == answers[2]
    assert resident_bytes(os.getpid()) - resident < LEFT_BEHIND
    assert set(psutil.Process().children()) <= children


def test_mem_05_a_pool_smaller_than_the_context(serve: Serve, script_model: Path) -> None:
    client = serve(script_model, "--max-total-tokens", "100", "--context-length", "4096")
    assert wait_for(lambda: "WARNING" in client.server.log())
    (line,) = [line for line in client.server.log().splitlines() if "WARNING" in line]
    assert "100" in line
    assert "4096" in line
    long = client.post(NATIVE, {"input_ids": byte_ids(LONG) * 100, "sampling_params": greedy(1)})
    assert long.status_code == 400
    assert "100" in long.json()["error"]["message"]
    answer = client.generate(byte_ids(LONG) * 90, greedy(10))
    assert answer["text"] == digits(10)


REFUSED = {
    "--max-total-tokens 0": "--max-total-tokens",
    "--max-total-tokens 1": "KV pool",
    "--mem-fraction-static 0.0001": "--mem-fraction-static",
}


def test_mem_05_too_little_for_anything_is_refused(script_model: Path) -> None:
    with contextlib.ExitStack() as stack:
        begin = time.monotonic()
        servers = {
            flags: stack.enter_context(start_server(script_model, "--device", "cpu", *flags.split()))
            for flags in REFUSED
        }
        for flags, word in REFUSED.items():
            server = servers[flags]
            assert server.process.wait(REFUSAL_SECONDS) not in (0, None), flags
            assert word in server.log(), server.log()
            assert "Traceback" not in server.log()
        assert time.monotonic() - begin < REFUSAL_SECONDS


def write_large_model(folder: Path) -> Path:
    """A checkpoint without weights whose slots are so large that they fill any share of a GPU."""
    sizes = {"hidden": 2048, "intermediate": 5632, "layers": 24, "heads": 16, "kv_heads": 16, "head_dim": 128}
    tokenizer = byte_tokenizer()
    config = raw_config(
        vocab_size=tokenizer.get_vocab_size(),
        total_loops=4,
        dtype="bfloat16",
        max_position=16384,
        threshold=1.0,
        **sizes,
    )
    return write_checkpoint(folder, config, {"unused": torch.zeros(1)}, tokenizer, [0])


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_mem_01_what_others_hold_is_not_ones_own(tmp_path: Path) -> None:
    """The share is one of the whole device and counts own memory only: others' 40 % leave room for 30 %."""
    holder = (
        "import sys, torch\n"
        "total = torch.cuda.get_device_properties(0).total_memory\n"
        "held = torch.empty(int(0.4 * total), dtype=torch.uint8, device='cuda')\n"
        "print(total, flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        total = int(other.stdout.readline())
        model = write_large_model(tmp_path / "large")
        with Engine(model, device="cuda", load_format="dummy", mem_fraction_static=0.3) as engine:
            assert engine._manager is not None
            assert engine._manager.facts is not None
            facts = engine._manager.facts
            pool = facts.num_slots * facts.server_info["slot_bytes"]
            assert 0.2 * total < pool < 0.3 * total
            assert len(engine.generate("Once", greedy(8, ignore_eos=True))["output_ids"]) == 8
    finally:
        other.communicate()
