"""``sglang serve`` and ``python -m sglang.launch_server`` start this server for Ouro checkpoints only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import byte_ids, chain_of, script_checkpoint
from tests.server import running_server

pytest.importorskip("sglang")

SERVE = [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve"]
LAUNCH_SERVER = [sys.executable, "-m", "sglang.launch_server"]


@pytest.fixture(scope="module")
def ouro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script_checkpoint(tmp_path_factory.mktemp("script"), chain_of([*byte_ids("xabc"), 0]))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def outcome(command: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("command", [SERVE, LAUNCH_SERVER], ids=["serve", "launch_server"])
def test_ouro_is_served_by_this_server(ouro_folder: Path, command: list[str]) -> None:
    with running_server(ouro_folder, command=command) as server:
        answer = server.generate("x", temperature=0, max_new_tokens=8)
        assert answer["text"] == "abc"
        assert answer["meta_info"]["exit_depths"][0] == 4


@pytest.mark.parametrize("command", [SERVE, LAUNCH_SERVER], ids=["serve", "launch_server"])
def test_flags_are_ours_for_ouro_and_sglangs_for_others(
    ouro_folder: Path, other_folder: Path, command: list[str]
) -> None:
    ours = outcome(command, "--model-path", str(ouro_folder), "--no-such-flag")
    assert ours.returncode == 2
    assert "ouro_sgl: error: unknown flag --no-such-flag" in ours.stderr
    stock = outcome(command, "--model-path", str(other_folder), "--no-such-flag")
    assert stock.returncode == 2
    assert "ouro_sgl" not in stock.stderr
    assert "unrecognized arguments: --no-such-flag" in stock.stderr


def test_positional_model_and_explicit_backend(ouro_folder: Path) -> None:
    positional = outcome(SERVE, str(ouro_folder), "--no-such-flag")
    assert "ouro_sgl: error: unknown flag --no-such-flag" in positional.stderr
    helped = outcome(SERVE, "--model-type", "ouro", "--help")
    assert helped.returncode == 0
    assert "ouro_sgl.launch_server" in helped.stdout
