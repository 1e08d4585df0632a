"""The terminal chat and the commands of ``python -m ouro_sgl``."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ouro_sgl import Engine
from ouro_sgl.chat import Chat, Painter, wants_colour
from ouro_sgl.frontend.chat_template import ChatTemplate
from tests.models import byte_ids, chain_of, script_checkpoint

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers every prompt (they end with a newline) with "yes": y leaves early, e and s late."""
    chain = chain_of([*byte_ids("\nyes"), 2])
    hazards = {byte_ids("y")[0]: 0.9, byte_ids("e")[0]: 0.2, byte_ids("s")[0]: 0.4}
    return script_checkpoint(tmp_path_factory.mktemp("model") / "yes", chain, hazards=hazards)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, num_slots=4096) as running:
        yield running


def talk(engine: Engine, model: Path, lines: list[str], out: io.StringIO, threshold: float = 0.5) -> Chat:
    chat = Chat(engine, ChatTemplate(model), threshold, out)
    chat.run(lines)
    return chat


def test_answers_and_remembers(engine: Engine, model: Path) -> None:
    out = io.StringIO()
    chat = talk(engine, model, ["hello", "", "again", "/quit", "never read"], out)
    assert [message["content"] for message in chat.messages] == ["hello", "yes", "again", "yes"]
    text = out.getvalue()
    assert text.count("yes\n") == 2
    assert "\x1b" not in text
    assert "[4 tokens, " in text


def test_colours_follow_the_exit_depths(engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    talk(engine, model, ["hello"], out)
    depths = engine.generate("\n", {"temperature": 0, "exit_threshold": 0.5})["meta_info"]["exit_depths"]
    assert len(set(depths[:3])) > 1
    painter = Painter(4, colour=True)
    painted = "".join(painter.paint(letter, depth) for letter, depth in zip("yes", depths, strict=False))
    assert painted in out.getvalue()
    assert "loops per token: 1 2 3 4" in ESCAPE.sub("", out.getvalue())


def test_commands(engine: Engine, model: Path) -> None:
    out = io.StringIO()
    chat = talk(engine, model, ["hello", "/reset", "/threshold 1", "hello", "/threshold 2", "/nothing"], out)
    assert chat.threshold == 1.0
    assert len(chat.messages) == 2
    text = out.getvalue()
    assert "[4 tokens, 4.00 loops on average]" in text
    assert "not '2'" in text
    assert "unknown command /nothing" in text


def test_a_refused_turn_is_told_and_forgotten(engine: Engine, model: Path) -> None:
    out = io.StringIO()
    chat = talk(engine, model, ["x" * 2000, "hello"], out)
    assert "/reset" in out.getvalue()
    assert [message["content"] for message in chat.messages] == ["hello", "yes"]


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


@pytest.mark.parametrize("loops", [1, 2, 4, 8])
def test_shallow_and_deep_differ_for_any_number_of_loops(loops: int) -> None:
    painter = Painter(loops, colour=True)
    shades = {painter.paint("x", depth) for depth in range(1, loops + 1)}
    assert len(shades) == min(loops, 4)


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ouro_sgl", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=250)


def test_the_command_reads_lines(model: Path) -> None:
    done = run("chat", "--model-path", str(model), "--num-slots", "2048", stdin="hello\n/quit\n")
    assert done.returncode == 0
    assert "yes" in done.stdout
    assert done.stderr == ""


def test_commands_are_told_and_refused() -> None:
    assert "serve" in run("--help").stdout
    for words in ([], ["talk"], ["chat", "--port", "5"], ["serve", "--prot", "5"]):
        done = run(*words)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
