"""Profiles of a worker: written whole, or an answer that says why not."""

from __future__ import annotations

import gzip
import json
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ouro_sgl.messages import Profile, Profiled, ShutdownReq
from ouro_sgl.worker import process, profile
from ouro_sgl.worker.profile import Profiler


def test_a_profile_holds_what_ran_between_its_ends(tmp_path: Path) -> None:
    profiler = Profiler()
    assert profiler.handle(Profile(str(tmp_path))).ok
    again = profiler.handle(Profile("/elsewhere"))
    assert (again.ok, again.message) == (False, f"a profile for {tmp_path} is being taken")
    torch.ones(3, 3) @ torch.ones(3, 3)
    ended = profiler.handle(Profile(None))
    assert ended.ok
    (file,) = tmp_path.iterdir()
    assert ended.message == f"the profile is written to {file}"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert "aten::matmul" in {event.get("name") for event in events}
    assert profiler.handle(Profile(None)) == Profiled(False, "no profile is being taken")
    assert profiler.handle(Profile(str(tmp_path))).ok  # another one may follow
    assert profiler.handle(Profile(None)).ok


def test_a_profile_that_nobody_ends_ends_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler()
    profiler.check_time()
    assert profiler.milliseconds_left() is None
    assert profiler.handle(Profile(str(tmp_path))).ok
    left = profiler.milliseconds_left()
    assert left is not None
    assert 1 < left <= 10_001
    profiler.check_time()
    assert not list(tmp_path.iterdir())  # it has time left
    monkeypatch.setattr(profile, "MAX_SECONDS", 0.0)
    profiler.handle(Profile(None))
    assert profiler.handle(Profile(str(tmp_path))).ok
    assert profiler.milliseconds_left() == 1
    profiler.check_time()
    assert len(list(tmp_path.iterdir())) == 2
    over = profiler.handle(Profile(None))
    assert over.ok
    assert over.message.endswith(".trace.json.gz; it had reached its 0 s")
    assert profiler.handle(Profile(None)).message == "no profile is being taken"


@pytest.mark.parametrize("folder", ["/does/not/exist", "/dev/null", "/nowhere/a\0b", "/" + "a" * 5000])
def test_a_folder_that_is_none_is_named(folder: str) -> None:
    profiler = Profiler()
    refused = profiler.handle(Profile(folder))
    assert not refused.ok
    assert "is not a folder" in refused.message
    assert profiler.handle(Profile(None)).message == "no profile is being taken"


def test_a_profile_beside_another_profiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: torch.profiler.profile) -> None:
        raise RuntimeError("another one is at work")

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "start", start)
        profiler = Profiler()
        refused = profiler.handle(Profile(str(tmp_path)))
        assert not refused.ok
        assert "another one is at work" in refused.message
    assert profiler.handle(Profile(None)).message == "no profile is being taken"


@pytest.mark.parametrize("now_a_file", [False, True])
def test_a_folder_that_is_gone_at_the_end_is_an_answer(tmp_path: Path, now_a_file: bool) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    profiler = Profiler()
    assert profiler.handle(Profile(str(folder))).ok
    folder.rmdir()
    if now_a_file:
        folder.touch()
    ended = profiler.handle(Profile(None))
    assert not ended.ok
    assert str(folder) in ended.message


@pytest.mark.parametrize("room", [0, 4096, 1 << 17])
def test_what_does_not_fit_is_not_written_in_part(tmp_path: Path, room: int) -> None:
    profiler = Profiler()
    assert profiler.handle(Profile(str(tmp_path))).ok
    for _ in range(1000):
        torch.ones(3, 3) @ torch.ones(3, 3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        ended = profiler.handle(Profile(None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not ended.ok
    assert "no room" in ended.message or "File too large" in ended.message
    assert list(tmp_path.iterdir()) == []


def test_profiles_in_the_same_second_are_files_of_their_own(tmp_path: Path) -> None:
    profiler = Profiler()
    for _ in range(5):
        assert profiler.handle(Profile(str(tmp_path))).ok
        assert profiler.handle(Profile(None)).ok
    assert len(list(tmp_path.iterdir())) == 5


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_memory_of_a_profile_comes_back(tmp_path: Path) -> None:
    profiler = Profiler()
    assert profiler.handle(Profile(str(tmp_path))).ok
    assert profiler.handle(Profile(None)).ok  # what the first one loads stays
    before = resident()
    assert profiler.handle(Profile(str(tmp_path))).ok
    matrix = torch.ones(3, 3)
    for _ in range(50_000):
        torch.mm(matrix, matrix)
    assert profiler.handle(Profile(None)).ok
    assert resident() - before < 50 << 20


def test_an_idle_worker_ends_a_profile_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes it but the end of the profile's time."""
    monkeypatch.setattr(profile, "MAX_SECONDS", 0.2)
    inbox: list[object] = [Profile(str(tmp_path))]
    polls: list[int | None] = []
    answers: list[Profiled] = []

    def poll(milliseconds: int | None) -> None:
        polls.append(milliseconds)
        if milliseconds is not None:
            time.sleep(milliseconds / 1000)  # nothing comes
        elif len(polls) > 1:
            inbox.append(ShutdownReq())

    def drain() -> list[object]:
        found = list(inbox)
        inbox.clear()
        return found

    worker = SimpleNamespace(idle=True, launching_chunk=False, step=lambda: None)
    plans = SimpleNamespace(socket=SimpleNamespace(poll=poll), drain=drain)
    process.serve(worker, plans, SimpleNamespace(send=answers.append))
    assert [answer.ok for answer in answers] == [True]
    assert (polls[0], polls[-1], len(polls)) == (None, None, 3)
    assert len(list(tmp_path.iterdir())) == 1
