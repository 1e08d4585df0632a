"""Profiles of a running worker, as traces that Perfetto and chrome://tracing show."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ouro_sgl.messages import Profile, Profiled


class Profiler:
    """torch's profiler from one :class:`Profile` to the next."""

    def __init__(self) -> None:
        self._running: torch.profiler.profile | None = None
        self._folder = Path()

    def handle(self, message: Profile) -> Profiled:
        """Begin, or end and write. Writing takes the worker's time: seconds for some thousand rounds."""
        if message.folder is None:
            return self._end()
        if self._running is not None:
            return Profiled(False, f"a profile for {self._folder} is being taken")
        self._folder = Path(message.folder)
        if not self._folder.is_dir():
            return Profiled(False, f"output_dir {message.folder!r} is not a folder")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        running = torch.profiler.profile(activities=activities)
        running.start()
        self._running = running
        return Profiled(True, f"a profile is being taken; /stop_profile writes it to {self._folder}")

    def _end(self) -> Profiled:
        running, self._running = self._running, None
        if running is None:
            return Profiled(False, "no profile is being taken")
        running.stop()
        # under its name only when it is whole; torch takes the last suffix to compress
        file = self._folder / f"ouro_sgl-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json.gz"
        partial = file.with_name(f".{file.name}")
        try:
            running.export_chrome_trace(str(partial))
            os.replace(partial, file)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            return Profiled(False, f"the profile could not be written to {self._folder}: {error}")
        return Profiled(True, f"the profile is written to {file}")
