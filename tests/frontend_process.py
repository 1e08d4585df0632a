"""The frontend process of a test: ``frontend_process.py <settings.json> <directory of the sockets>``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import uvloop

from ouro_sgl.config import ServerArgs
from ouro_sgl.frontend.server import serve
from ouro_sgl.log import setup_logging


def main() -> int:
    args = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ServerArgs)
    ipc_dir = Path(sys.argv[2])
    dead = ipc_dir / "child-died"  # a test writes this file to play the death of a child

    def children() -> str | None:
        return dead.read_text() if dead.exists() else None

    setup_logging("frontend", args.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(args, ipc_dir, children))


if __name__ == "__main__":
    sys.exit(main())
