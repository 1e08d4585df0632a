"""The frontend process: HTTP from the first moment, until a signal or the death of a child."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.frontend.app import Application
from ouro_sgl.frontend.manager import TokenizerManager

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
# Seconds that the reason of a child's death may take to arrive over the socket.
REASON_SECONDS = 1.0
# Seconds that answers, errors included, get to reach their clients at the end.
FLUSH_SECONDS = 2


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to :func:`serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address is taken or not of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


async def serve(args: ServerArgs, ipc_dir: Path, children: Callable[[], str | None]) -> int:
    """Serve until SIGINT or SIGTERM (a second one aborts what still runs) or until a child dies.

    Args:
        args: resolved settings.
        ipc_dir: the directory of the sockets.
        children: what happened, when a child process is dead; polled every 100 ms.

    Returns:
        Exit code: 0 after a signal, 128 and its number if the server was not ready yet, 1 when a process of
        the server died or the recorded exit depths could not be written.

    Raises:
        ConfigError: the port, the tokenizer, the chat template or the exit trace file cannot be used.
    """
    manager = TokenizerManager(args, ipc_dir)
    app = Application(manager, args.api_key, args.max_body_bytes)
    listener = _listen(args.host, args.port)
    manager.start()
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
    )
    stop, hurry = asyncio.Event(), asyncio.Event()

    early = 0  # the signal that came before the server was ready

    def on_signal(signum: int) -> None:
        nonlocal early
        if not manager.ready.is_set():
            early = signum
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal, signum)
    serving = loop.create_task(server.serve(sockets=[listener]))
    recorded = True
    try:
        await _supervise(args, manager, children, stop, serving)
        if manager.failure is None:
            await manager.drain(args.shutdown_timeout, hurry)
        server.should_exit = True
        await serving
    finally:
        try:
            manager.close()
        except OSError as error:  # its place has gone since the start
            log.error("the exit depths could not be recorded: %s", error)
            recorded = False
    if manager.failure is not None:
        log.error("%s", manager.failure)
    if not recorded or manager.failure is not None:
        return 1
    return 128 + early if early else 0


async def _supervise(
    args: ServerArgs,
    manager: TokenizerManager,
    children: Callable[[], str | None],
    stop: asyncio.Event,
    serving: asyncio.Task[None],
) -> None:
    """Return when the server has to end; says once that it is ready."""
    announced = False
    while not stop.is_set() and manager.failure is None and not serving.done():
        death = children()
        if death is not None:
            # The scheduler may know more than an exit code: its word goes first.
            deadline = time.monotonic() + REASON_SECONDS
            while manager.failure is None and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            manager.fail(death)
        elif manager.ready.is_set() and not announced:
            announced = True
            # What exists now lives as long as the server: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            _warn_of_limits(manager)
            _announce(manager, args)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), POLL_SECONDS)


def _announce(manager: TokenizerManager, args: ServerArgs) -> None:
    assert manager.facts is not None
    # The device, because --device auto takes the CPU without a word where it cannot use a GPU.
    device = manager.facts.server_info["device"]
    print(f"ouro_sgl: {manager.model_name} is ready at {_url(args)} (device {device})", flush=True)


def _warn_of_limits(manager: TokenizerManager) -> None:
    facts = manager.facts
    if facts is not None and facts.served_length < facts.context_length:
        log.warning(
            "the K/V pool holds %d tokens at full depth, less than the context of %d: longer requests "
            "are refused",
            facts.served_length,
            facts.context_length,
        )


def _url(args: ServerArgs) -> str:
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http://{host}:{args.port}"
