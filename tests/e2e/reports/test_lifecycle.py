"""Reported faults of starting and ending: signals, dead processes, taken ports, bad checkpoints.

Starts take most of the time, so the servers of a group start together; each test uses up its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.reports.support import LONG, NATIVE, Client, digits, greedy, wait_for
from tests.models import byte_ids, chain_of, script_checkpoint
from tests.server import Server, alive, children_of, held_port, start_server

END_SECONDS = 5 * 10.0  # in which all processes of a server are gone, with slack for a loaded machine
REFUSAL_SECONDS = 200.0


SIGNALS: dict[str, list[int]] = {
    "SIGINT": [signal.SIGINT],
    "SIGTERM": [signal.SIGTERM],
    "two SIGINTs": [signal.SIGINT, signal.SIGINT],
}
DEATHS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV}

Launch = Callable[[str], Server]


def is_refused(url: str) -> bool:
    """Whether nothing listens there any more."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """Ports in a row, held as in :func:`held_port`."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(held_port())
            try:
                others = [stack.enter_context(held_port(first + index)) for index in range(1, count)]
            except (OSError, OverflowError):
                continue
            yield [first, *others]
            return


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers "5" with "V", "W" and so on, where the shared script model counts."""
    chain = chain_of([*byte_ids("5VWXYZ"), *byte_ids("V")])
    return script_checkpoint(tmp_path_factory.mktemp("other") / "script", chain, max_position=8192)


@pytest.fixture(scope="module")
def servers(script_model: Path, other_model: Path) -> Iterator[Launch]:
    """Servers by name, all started at once at neighbouring ports."""
    names = [*SIGNALS, *DEATHS]
    running: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        for name, port in zip(names, stack.enter_context(neighbours(len(names))), strict=True):
            model = other_model if name == "SIGINT" else script_model
            # The others have the default patience with what runs, and must end in time all the same.
            flags = ["--num-slots", "32768", *(["--shutdown-timeout", "1"] if name == "SIGINT" else [])]
            running[name] = stack.enter_context(start_server(model, *flags, port=port))

        def ready(name: str) -> Server:
            running[name].wait_ready()
            return running[name]

        yield ready


def family(server: Server) -> list[int]:
    pids = [server.process.pid, *children_of(server.process.pid)]
    assert len(pids) == 3
    return pids


def assert_gone(server: Server, pids: list[int], begin: float) -> None:
    assert wait_for(lambda: not any(map(alive, pids)), END_SECONDS)
    assert is_refused(server.url)
    assert time.monotonic() - begin < END_SECONDS
    assert "Traceback" not in server.log()


def test_lif_07_two_servers_side_by_side(servers: Launch) -> None:
    """Before the other tests end them."""
    clients = [Client(servers("SIGTERM")), Client(servers("SIGINT"))]
    wanted = [digits(12), ("VWXYZ" * 3)[:12]]
    assert abs(int(clients[0].server.url[-5:]) - int(clients[1].server.url[-5:])) < 10
    calls = [lambda c=c: c.generate(LONG, greedy(12))["text"] for _ in range(40) for c in clients]
    found = clients[0].at_once(calls[:40])
    for start in range(40, len(calls), 40):
        found += clients[0].at_once(calls[start : start + 40])
    assert found == wanted * 40
    for client in clients:
        client.close()


@pytest.mark.parametrize("name", list(SIGNALS))
def test_lif_01_a_signal_ends_everything(servers: Launch, name: str) -> None:
    server = servers(name)
    client = Client(server)
    pids = family(server)
    stream = client.stream_text(LONG, greedy(7000)).wait_chunks(2)
    begin = time.monotonic()
    for signum in SIGNALS[name]:
        server.process.send_signal(signum)
        time.sleep(0.1)
    # An open stream ends: complete, aborted or with an error, but it ends.
    stream.finish(END_SECONDS)
    last = stream.chunks[-1]
    assert "error" in last or last["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    server.process.wait(END_SECONDS)
    assert_gone(server, pids, begin)
    client.close()


def test_lif_01_and_the_next_start_works(script_model: Path) -> None:
    """A signal during start-up, and a server at the same port afterwards."""
    with held_port() as port:
        with start_server(script_model, "--num-slots", "4096", port=port) as server:
            assert wait_for(lambda: len(children_of(server.process.pid)) == 2)
            pids = family(server)
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(END_SECONDS)
            assert_gone(server, pids, begin)
        with start_server(script_model, "--num-slots", "4096", port=port) as again:
            again.wait_ready()
            assert again.generate(LONG, **greedy(5))["text"] == digits(5)


@pytest.mark.parametrize("name", list(DEATHS))
def test_lif_03_the_scheduler_dies(servers: Launch, name: str) -> None:
    server = servers(name)
    client = Client(server)
    pids = family(server)
    scheduler = client.pids()["ouro_sgl::scheduler"]
    stream = client.stream_text(LONG, greedy(7000)).wait_chunks(2)
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(client.post(NATIVE, {"text": LONG, "sampling_params": greedy(7000)}).status_code)
        except httpx.HTTPError as error:
            outcome.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.2)
    begin = time.monotonic()
    os.kill(scheduler, DEATHS[name])
    # A new request gets an error too, or nobody listens any more.
    with contextlib.suppress(httpx.HTTPError):
        response = client.post(NATIVE, {"text": LONG, "sampling_params": greedy(3)})
        assert response.status_code == 503
    caller.join(END_SECONDS)
    assert not caller.is_alive()
    assert isinstance(outcome[0], httpx.HTTPError) or outcome[0] == 503
    assert wait_for(lambda: not stream.running, END_SECONDS)
    assert stream.error is not None or "error" in stream.chunks[-1]
    assert server.process.wait(END_SECONDS) not in (0, None)
    assert "scheduler" in server.log()
    assert_gone(server, pids, begin)
    client.close()


@pytest.mark.parametrize(
    ("family_", "host", "flag"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", "0.0.0.0"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "::1"),
    ],
)
def test_lif_05_the_port_is_taken(family_: int, host: str, flag: str, script_model: Path) -> None:
    try:
        listener = socket.create_server((host, 0), family=family_)
    except OSError:
        pytest.skip("this machine has no such address")
    with listener:
        port = str(listener.getsockname()[1])
        words = [sys.executable, "-m", "ouro_sgl.launch_server", "--host", flag, "--port", port]
        done = subprocess.run(
            [*words, "--model-path", str(script_model)],
            capture_output=True,
            text=True,
            timeout=REFUSAL_SECONDS,
        )
    assert done.returncode not in (0, None)
    assert port in done.stderr
    assert len(done.stderr.splitlines()) == 1  # nothing was started that could have said more


# --------------------------------------------------------------------------- bad checkpoints


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_a_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "ouro",')


def with_another_architecture(folder: Path) -> None:
    edit(folder, model_type="llama", architectures=["LlamaForCausalLM"])


def without_loops(folder: Path) -> None:
    edit(folder, total_ut_steps=0)


def without_a_shard(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:4]}, folder / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 if name in names[:4] else 2}-of-00002.safetensors" for name in names}
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def with_a_wrong_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without_tokenizer, "tokenizer.json"),
    "broken config": (with_a_broken_config, "config.json"),
    "another architecture": (with_another_architecture, "llama"),
    "no loops": (without_loops, "total_ut_steps"),
    "a missing shard": (without_a_shard, "model-00002-of-00002.safetensors"),
    "a wrong shape": (with_a_wrong_shape, "model.norm.weight"),
}
KILLED = "a killed worker"


@pytest.fixture(scope="module")
def failures(
    script_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Server, Path]]]:
    """Servers that cannot start, all at once, and where each puts its temporary files."""
    base = tmp_path_factory.mktemp("broken")
    with contextlib.ExitStack() as stack:
        running = {}
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix="t")))
        for name in (*BROKEN, KILLED):
            folder = base / name.replace(" ", "-")
            shutil.copytree(script_model, folder)
            if name in BROKEN:
                BROKEN[name][0](folder)
            temporary = root / str(len(running))
            temporary.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TMPDIR", str(temporary))
                server = stack.enter_context(start_server(folder, "--num-slots", "4096"))
            running[name] = server, temporary
        client = Client(running[KILLED][0])
        # A child is called so when it has begun to load.
        assert wait_for(lambda: "ouro_sgl::worker" in client.pids(), REFUSAL_SECONDS)
        os.kill(client.pids()["ouro_sgl::worker"], signal.SIGKILL)
        client.close()
        yield running


@pytest.mark.parametrize("name", [*BROKEN, KILLED])
def test_lif_08_a_start_that_fails_says_why(failures: dict[str, tuple[Server, Path]], name: str) -> None:
    server, temporary = failures[name]
    assert server.process.wait(REFUSAL_SECONDS) not in (0, None)
    word = "worker" if name == KILLED else BROKEN[name][1]
    last = server.log().strip().splitlines()[-3:]
    assert any(word in line for line in last), server.log()
    assert "Traceback" not in server.log()
    assert is_refused(server.url)
    # The launcher removes its directory last, when it has seen the end of its children.
    assert not list(temporary.iterdir())
