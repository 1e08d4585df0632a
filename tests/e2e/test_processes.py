"""The three processes of a real server: who they are, what they load, how they end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.models import rand_checkpoint
from tests.server import READY_TIMEOUT, Server, alive, children_of, running_server, start_server

TITLES = {"ouro_sgl::frontend", "ouro_sgl::scheduler", "ouro_sgl::worker"}
READY_GOAL = 8.0  # seconds until a small model is served
RSS_GOAL = 250 << 20  # bytes of frontend and scheduler together


def wait_for(condition: Callable[[], bool], seconds: float = 100.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def family(pid: int) -> dict[str, int]:
    """Process ids of a server by title."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {title(member): member for member in (pid, *map(int, children))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("model") / "rand")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where servers of this test put their private directories."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    begin = time.monotonic()
    with running_server(model, "--num-slots", "2048") as running:
        # Liveness with slack for a loaded machine; an idle one is measured by hand.
        assert time.monotonic() - begin < 5 * READY_GOAL
        yield running


def test_three_processes_with_their_titles(server: Server) -> None:
    assert set(family(server.process.pid)) == TITLES


def test_only_the_worker_loads_torch(server: Server) -> None:
    server.generate("abc", max_new_tokens=4)
    assert {name for name, pid in family(server.process.pid).items() if loads_torch(pid)} == {
        "ouro_sgl::worker"
    }


def test_frontend_and_scheduler_are_small(server: Server) -> None:
    server.generate("abc", max_new_tokens=4)
    pids = family(server.process.pid)
    resident = sum(resident_bytes(pids[name]) for name in TITLES - {"ouro_sgl::worker"})
    assert resident < RSS_GOAL, f"{resident / 2**20:.0f} MiB"


def test_an_orderly_end(model: Path, temporary: Path) -> None:
    with running_server(model, "--num-slots", "512") as server:
        pids = family(server.process.pid).values()
        (folder,) = temporary.glob("ouro_sgl-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len([path for path in folder.iterdir() if path.is_socket()]) == 4
        assert server.stop() == 0, server.log()
        assert not any(alive(pid) for pid in pids)
        assert not folder.exists()
        assert "Traceback" not in server.log()


def test_an_interrupt_from_the_keyboard_ends_it_too(model: Path) -> None:
    with running_server(model, "--num-slots", "512") as server:
        pids = family(server.process.pid).values()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(100) in (0, 130)
        assert wait_for(lambda: not any(alive(pid) for pid in pids))
        assert "Traceback" not in server.log()


def test_children_die_with_a_killed_frontend(model: Path, temporary: Path) -> None:
    with running_server(model, "--num-slots", "512") as server:
        pids = family(server.process.pid).values()
        assert len(pids) == 3
        server.process.kill()
        server.process.wait()
        assert wait_for(lambda: not any(alive(pid) for pid in pids))
        assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0, 2.0])  # seconds; the server is ready after about 2
@pytest.mark.parametrize("pause", [None, 0.3])  # before a second interrupt
def test_interrupts_while_it_starts(model: Path, temporary: Path, moment: float, pause: float | None) -> None:
    with start_server(model, "--num-slots", "512") as server:
        assert wait_for(lambda: any(temporary.glob("ouro_sgl-*")))
        time.sleep(moment)
        pids = children_of(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        if pause is not None:
            time.sleep(pause)
            with suppress(ProcessLookupError):
                server.process.send_signal(signal.SIGINT)
        assert server.process.wait(100) in (0, 130), server.log()
        assert not any(alive(pid) for pid in pids)
        assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("name", ["ouro_sgl::scheduler", "ouro_sgl::worker"])
def test_a_dead_child_ends_the_server_with_a_reason(model: Path, name: str) -> None:
    with running_server(model, "--num-slots", "512") as server:
        os.kill(family(server.process.pid)[name], signal.SIGKILL)
        assert server.process.wait(100) not in (0, None)
        assert name.removeprefix("ouro_sgl::") in server.log()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_bad_checkpoint_ends_the_start_with_its_reason(tmp_path: Path, name: str) -> None:
    folder = rand_checkpoint(tmp_path / "bad")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with start_server(folder) as server:
        assert server.process.wait(READY_TIMEOUT) not in (0, None)
        assert name in server.log()
        assert "Traceback" not in server.log()


def test_a_stop_while_starting_leaves_nothing(model: Path) -> None:
    with start_server(model) as server:
        pid = server.process.pid
        assert wait_for(lambda: len(children_of(pid)) == 2)
        pids = children_of(pid)
        server.stop()
        assert wait_for(lambda: not any(alive(child) for child in pids))


def test_more_slots_than_memory_is_one_line(model: Path) -> None:
    with start_server(model, "--kv-cache-memory-bytes", str(10**16)) as server:
        assert server.process.wait(READY_TIMEOUT) == 1
        assert "there is no memory for" in server.log()
        assert "Traceback" not in server.log()
