"""``sglang serve`` and ``python -m sglang.launch_server`` start this server for Ouro checkpoints only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=250)


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
    assert "ouro_sgl: error" not in stock.stderr  # its own folder may be in a path
    assert "unrecognized arguments: --no-such-flag" in stock.stderr


def test_positional_model_and_explicit_backend(ouro_folder: Path) -> None:
    positional = outcome(SERVE, str(ouro_folder), "--no-such-flag")
    assert "ouro_sgl: error: unknown flag --no-such-flag" in positional.stderr
    helped = outcome(SERVE, "--model-type", "ouro", "--help")
    assert helped.returncode == 0
    assert "ouro_sgl.launch_server" in helped.stdout


def test_bundled_model_answers_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model path the bundled model is served; fork and select answer right, from the cache."""
    import sglang as sgl

    from ouro_sgl import RuntimeEndpoint

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("What is the capital of France?")
        s += sgl.assistant(sgl.gen("answer", temperature=0, max_tokens=24))
        s.sync()
        forks = s.fork(2)
        for fork, question in zip(forks, ["What color is the sky?", "What is 3 + 4?"], strict=True):
            fork += sgl.user(question) + sgl.assistant(sgl.gen("v", temperature=0, max_tokens=24))
        answers.append([s["answer"], *(fork["v"] for fork in forks)])
        cached.append([fork.get_meta_info("v")["cached_tokens"] for fork in forks])
        forks.join()
        s += sgl.user("Is the sky blue or green?") + sgl.assistant(sgl.select("v", ["green", "blue"]))

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    answers: list[list[str]] = []
    cached: list[list[int]] = []
    with running_server(None, command=[*SERVE, "--model-type", "ouro"]) as server:
        backend = RuntimeEndpoint(server.url, exit_threshold=0.5)
        states = [program.run(backend=backend) for _ in range(2)]
        assert [state["v"] for state in states] == ["blue", "blue"]
    assert answers[0] == answers[1]
    for answer, word in zip(answers[0], ["Paris", "blue", "7"], strict=True):
        assert word in answer
    # The first call finds the common prefix that fork has sent, the second also its own questions.
    assert min(cached[0]) > 0
    assert all(second > first for first, second in zip(*cached, strict=True))
