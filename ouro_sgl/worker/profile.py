"""Profiles of a running worker, as traces that Perfetto and chrome://tracing show."""

from __future__ import annotations

import ctypes
import gc
import gzip
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from ouro_sgl.messages import Profile, Profiled

MAX_SECONDS = 10.0  # of a profile: every event takes memory, and more to write


class Profiler:
    """torch's profiler from one :class:`Profile` to the next, or for ``MAX_SECONDS``."""

    def __init__(self) -> None:
        self._running: torch.profiler.profile | None = None
        self._folder = Path()
        self._count = 0  # of the files, which may be several in a second
        self._until = 0.0
        self._over: Profiled | None = None  # what became of a profile that nobody has ended

    def handle(self, message: Profile) -> Profiled:
        """Begin, or end and write. Writing takes the worker's time: seconds for some thousand rounds."""
        if message.folder is None:
            over, self._over = self._over, None
            return over or self._end()
        if self._running is not None:
            return Profiled(False, f"a profile for {self._folder} is being taken")
        self._folder = Path(message.folder)
        if not os.path.isdir(message.folder):  # Path.is_dir raises where the name is too long
            return Profiled(False, f"output_dir {message.folder!r} is not a folder")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        running = torch.profiler.profile(activities=activities)
        try:
            running.start()
        except RuntimeError as error:  # another profiler is at work in this process
            return Profiled(False, f"no profile can be taken: {error}")
        self._running, self._over = running, None
        self._until = time.monotonic() + MAX_SECONDS
        return Profiled(True, f"a profile is being taken; /stop_profile writes it to {self._folder}")

    def milliseconds_left(self) -> int | None:
        """Until ``check_time`` has something to do; None: nothing is being taken."""
        if self._running is None:
            return None
        return max(0, int((self._until - time.monotonic()) * 1000)) + 1

    def check_time(self) -> None:
        """End and write a profile that has run for too long; the next message that ends it is told so."""
        if self._running is not None and time.monotonic() > self._until:
            ended = self._end()
            self._over = Profiled(ended.ok, f"{ended.message}; it had reached its {MAX_SECONDS:.0f} s")

    def _end(self) -> Profiled:
        running, self._running = self._running, None
        if running is None:
            return Profiled(False, "no profile is being taken")
        self._count += 1
        name = f"ouro_sgl-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._count}.trace.json.gz"
        try:
            running.stop()
            _write(running, self._folder / name)
        except (OSError, RuntimeError) as error:
            return Profiled(False, f"the profile could not be written to {self._folder}: {error}")
        finally:
            # else a cycle and the C library would keep the events
            del running
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        return Profiled(True, f"the profile is written to {self._folder / name}")


def _write(profile: torch.profiler.profile, file: Path) -> None:
    """Write ``file`` whole or not at all. torch's own compression takes several times as long.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(
        dir=file.parent, prefix=f".{file.name}-", ignore_cleanup_errors=True
    ) as draft:
        plain, packed = Path(draft, "trace.json"), Path(draft, "trace.json.gz")
        profile.export_chrome_trace(str(plain))
        if not _is_whole(plain):
            raise OSError("there is no room for all of it")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(packed, file)


def _is_whole(trace: Path) -> bool:
    """torch only logs that it could not write: there is no file then, or not all of it."""
    if not trace.is_file():
        return False
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 2))
        return file.read().rstrip().endswith(b"}")
