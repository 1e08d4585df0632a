"""Checks before the start, and children that end whatever happens to the parent.

The children here are small stand-ins with the same contract (end at the end of standard input).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ouro_sgl import launch, launch_server
from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from tests.server import alive

CONFIG = {
    "model_type": "ouro",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": 256,
    "total_ut_steps": 4,
}

OBEDIENT = "import sys; sys.stdin.buffer.read()"
STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "deaf").touch()
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 100.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts other programs in the place of the children: ``stand_ins(scheduler=code, worker=code)``."""
    package = tmp_path / "stand_ins" / "ouro_sgl"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()

    def write(**code: str) -> None:
        for name, text in code.items():
            (package / f"{name}.py").write_text(text)

    write(scheduler=OBEDIENT, worker=OBEDIENT)
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    monkeypatch.setattr(launch, "child_environment", lambda: environment)
    return write


def test_resolve_fills_in_what_the_checkpoint_says(folder: Path) -> None:
    args = launch.resolve(ServerArgs(model_path=str(folder), api_key="k"))
    assert args.model_path == args.tokenizer_path == str(folder)
    assert args.served_model_name == str(folder)
    assert args.api_key == "k"
    named = launch.resolve(ServerArgs(model_path=str(folder), served_model_name="mine"))
    assert named.served_model_name == "mine"
    whole = ServerArgs(model_path=str(folder), chunked_prefill_size=-1)
    assert launch.resolve(whole).chunked_prefill_size == 256
    assert launch.resolve(replace(whole, context_length=100)).chunked_prefill_size == 100
    assert launch.resolve(args) == args


def test_folders_are_found_from_any_other_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    args = launch.resolve(ServerArgs(model_path=folder.name, tokenizer_path=folder.name))
    assert args.model_path == args.tokenizer_path == str(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_path": "/nowhere/at/all"}, ["/nowhere/at/all"]),
        ({"context_length": 257}, ["--context-length 257", "256"]),
        ({"default_min_loops": 5}, ["--default-min-loops 5", "4 loops"]),
        ({"default_max_loops": 5}, ["--default-max-loops 5", "4 loops"]),
        ({"tokenizer_path": "/nowhere"}, ["/nowhere", "tokenizer.json"]),
        ({"exit_mode": "lookahead"}, ["lookahead.safetensors"]),
        ({"chat_template": "/nowhere.jinja"}, ["--chat-template", "/nowhere.jinja"]),
        ({"record_exit_trace": "/nowhere/at/all"}, ["--record-exit-trace /nowhere/at/all", "written"]),
        ({"record_exit_trace": "/tmp/" + "a" * 255}, ["--record-exit-trace /tmp/a", "written"]),
        ({"record_exit_trace": "/tmp/a\0b"}, ["--record-exit-trace /tmp/a", "written"]),
        ({"chat_template": "a" * 300}, ["--chat-template", "not a file"]),
        ({"tokenizer_path": "a" * 300}, ["tokenizer.json"]),
        ({"model_path": "/" + "a" * 300}, ["does not exist"]),
        ({"record_exit_trace": "/"}, ["--record-exit-trace /", "written"]),
    ],
)
def test_resolve_refuses_what_does_not_fit(
    folder: Path, settings: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        launch.resolve(ServerArgs(**{"model_path": str(folder), **settings}))
    for word in words:
        assert word in str(caught.value)


def test_a_record_takes_the_place_of_a_file_only(folder: Path, tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("an older record")
    for record in (pipe, file / "below"):
        with pytest.raises(ConfigError, match="is not a file that can be written"):
            launch.resolve(ServerArgs(model_path=str(folder), record_exit_trace=str(record)))
    present = set(tmp_path.iterdir())
    for record in (file, tmp_path / "new"):
        launch.resolve(ServerArgs(model_path=str(folder), record_exit_trace=str(record)))
    assert file.read_text() == "an older record"
    assert set(tmp_path.iterdir()) == present


def test_a_record_is_known_by_the_file_that_its_name_comes_to(folder: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    link = tmp_path / "link"
    link.symlink_to(inner / "file")
    for record, file in (
        (link, inner / "file"),
        (tmp_path / "none" / ".." / "file", tmp_path / "file"),
        (inner / ".." / "file", tmp_path / "file"),
    ):
        args = ServerArgs(model_path=str(folder), record_exit_trace=str(record))
        assert launch.resolve(args).record_exit_trace == str(file)
        with pytest.raises(ConfigError, match="name the same file"):
            launch.resolve(replace(args, exit_trace=str(file)))


def test_resolve_names_a_missing_tokenizer_and_a_foreign_model(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        launch.resolve(ServerArgs(model_path=str(folder)))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    with pytest.raises(ConfigError, match="llama"):
        launch.resolve(ServerArgs(model_path=str(folder)))


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            launch.check_port("127.0.0.1", port)
    launch.check_port("127.0.0.1", port)


def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        launch.check_port("192.0.2.1", 30000)
    with pytest.raises(ConfigError, match="--host"):
        launch.check_port("x" * 70, 30000)  # too long for a name: refused without a look-up


def test_the_private_directory_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    path = launch.make_private_dir()
    try:
        assert path.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path / "scheduler-frontend"))
        assert not list(long.iterdir())
    finally:
        shutil.rmtree(path)


def test_children_find_the_settings_but_not_the_key(folder: Path, stand_ins: Callable[..., None]) -> None:
    processes = launch.Processes(ServerArgs(model_path=str(folder), api_key="secret", num_slots=64))
    try:
        text = (processes.ipc_dir / launch.CONFIG_FILE).read_bytes()
        assert b"secret" not in text
        assert msgspec.json.decode(text, type=ServerArgs).num_slots == 64
        assert set(processes.pids()) == {"scheduler", "worker"}
        assert processes.poll() is None
    finally:
        processes.shutdown(timeout=0)
    assert not processes.ipc_dir.exists()
    assert not any(alive(pid) for pid in processes.pids().values())
    processes.shutdown(timeout=0)


@pytest.mark.parametrize(
    ("code", "words"),
    [("import sys; sys.exit(3)", "exit code 3"), ("import os; os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_dead_child_is_named(folder: Path, stand_ins: Callable[..., None], code: str, words: str) -> None:
    stand_ins(worker=code)
    processes = launch.Processes(ServerArgs(model_path=str(folder)))
    try:
        assert wait_for(lambda: processes.poll() is not None)
        message = processes.poll()
        assert message is not None
        assert "worker" in message
        assert words in message
    finally:
        processes.shutdown(timeout=0)


def test_a_child_that_ignores_everything_is_killed(folder: Path, stand_ins: Callable[..., None]) -> None:
    stand_ins(worker=STUBBORN)
    processes = launch.Processes(ServerArgs(model_path=str(folder)))
    try:
        assert wait_for((processes.ipc_dir / "deaf").exists)
    finally:
        processes.shutdown(timeout=0)
    assert not any(alive(pid) for pid in processes.pids().values())


def test_children_die_with_a_killed_parent(folder: Path, stand_ins: Callable[..., None]) -> None:
    code = (
        "import sys, time\n"
        "from ouro_sgl import launch\n"
        "from ouro_sgl.config import ServerArgs\n"
        f"launch.child_environment = lambda: {launch.child_environment()!r}\n"
        f"processes = launch.Processes(ServerArgs(model_path={str(folder)!r}))\n"
        "print(*processes.pids().values(), processes.ipc_dir, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        *pids, ipc_dir = parent.stdout.readline().split()
        try:
            assert all(alive(int(pid)) for pid in pids)
            parent.send_signal(signal.SIGKILL)
            assert wait_for(lambda: not any(alive(int(pid)) for pid in pids))
        finally:
            parent.kill()
            shutil.rmtree(ipc_dir, ignore_errors=True)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--prot", "1"], "--port"),
        (["--model-path", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--chat-template", "x.jinja"], "--chat-template"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_server.main(["--host", "127.0.0.1", *flags]) == launch_server.EXIT_REFUSED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert word in captured.err
