"""``python -m ouro_sgl.launch_server [flags]``: the HTTP server, until it is stopped.

This process becomes the frontend. The children start before the HTTP stack is imported, so both
take their time at once.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import setproctitle

from ouro_sgl import cli, launch
from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.log import setup_logging

EXIT_REFUSED = 2  # the settings or the checkpoint cannot be served
EXIT_INTERRUPTED = 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _leave(signum: int, frame: object) -> NoReturn:
    for each in STOP_SIGNALS:  # a second one must not strike the way out
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def run(args: ServerArgs) -> int:
    """Serve with resolved settings until shutdown; the exit code of the process."""
    setproctitle.setproctitle("ouro_sgl::frontend")
    setup_logging("frontend", args.log_level)
    # A signal that struck while a child is being started would leave that child behind.
    early: list[int] = []
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda signum, frame: early.append(signum))
    processes = launch.Processes(args)
    told_to_end = False
    try:
        # Until the server has its own handlers: leave through the finally clause.
        for signum in STOP_SIGNALS:
            signal.signal(signum, _leave)
        if early:
            _leave(early[0], None)
        import uvloop

        from ouro_sgl.frontend.server import serve

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(serve(args, processes.ipc_dir, processes.poll))
        told_to_end = code == 0
    finally:
        for signum in STOP_SIGNALS:  # asyncio has put back Python's own handlers
            signal.signal(signum, lambda signum, frame: processes.kill())
        processes.shutdown(timeout=5.0 if told_to_end else 0.5)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, serve. A refusal is one line on standard error and exit code 2."""
    try:
        args = cli.parse_args(sys.argv[1:] if argv is None else argv)
        launch.check_port(args.host, args.port)
        args = launch.resolve(args)
        return run(args)
    except ConfigError as error:
        print(f"ouro_sgl: error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
