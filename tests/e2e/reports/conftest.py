"""Servers for the tests of this folder, each started at its first use and shared until the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.reports.support import CHAIN, SCRIPT_TOKENIZER, Client
from tests.models import rand_checkpoint, script_checkpoint
from tests.server import running_server

Serve = Callable[..., Client]


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """``serve(model, *flags)``: a client of such a server; equal arguments share one server."""
    clients: dict[tuple[str, ...], Client] = {}
    with contextlib.ExitStack() as stack:

        def start(model: Path | None, *flags: str) -> Client:
            key = (str(model), *flags)
            if key not in clients:
                server = stack.enter_context(running_server(model, *flags))
                clients[key] = Client(server)
                stack.callback(clients[key].close)
            return clients[key]

        yield start
        for client in clients.values():  # they end side by side
            client.server.process.terminate()


@pytest.fixture(scope="session")
def script_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of known answers, see ``support.CHAIN``; context 8192."""
    path = tmp_path_factory.mktemp("reports") / "script"
    return script_checkpoint(path, CHAIN, tokenizer=SCRIPT_TOKENIZER, max_position=8192)


@pytest.fixture(scope="session")
def rand_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers in which no token leaves early; context 1024."""
    return rand_checkpoint(tmp_path_factory.mktemp("reports") / "rand")


@pytest.fixture(scope="session")
def ouro_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model again, with a threshold at which tokens leave after 1, 2, 3 and 4 loops."""
    return rand_checkpoint(tmp_path_factory.mktemp("reports") / "ouro", threshold=0.7)


@pytest.fixture(scope="session")
def script(serve: Serve, script_model: Path) -> Client:
    return serve(script_model, "--num-slots", "131072")


@pytest.fixture(scope="session")
def rand(serve: Serve, rand_model: Path) -> Client:
    return serve(rand_model, "--num-slots", "32768")


@pytest.fixture(scope="session")
def ouro(serve: Serve, ouro_model: Path) -> Client:
    return serve(ouro_model, "--num-slots", "32768")


@pytest.fixture(scope="session")
def tiny(serve: Serve) -> Client:
    """The bundled checkpoint."""
    return serve(None, "--num-slots", "32768")


@pytest.fixture(scope="session")
def small(serve: Serve, ouro_model: Path) -> Client:
    """The looped model in a pool of 300 tokens, with chunks of 16, 6 rows and rounds in flight."""
    flags = "--max-total-tokens 300 --chunked-prefill-size 16 --max-running-requests 6 --rounds-in-flight 3"
    return serve(ouro_model, *flags.split())


@pytest.fixture(scope="session")
def queue(serve: Serve, script_model: Path) -> Client:
    """The script model, one request at a time, with several rounds ahead of the host."""
    return serve(
        script_model, "--num-slots", "65536", "--max-running-requests", "1", "--rounds-in-flight", "4"
    )


@pytest.fixture(scope="session")
def narrow(serve: Serve, rand_model: Path) -> Client:
    """The random model within a context of 64, prompts in chunks of 16, 32 prompt tokens a step."""
    flags = ("--context-length", "64", "--chunked-prefill-size", "16", "--max-prefill-tokens", "32")
    return serve(rand_model, "--num-slots", "16384", *flags)


@pytest.fixture(scope="session")
def bare(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """The script model without a chat template and without any end token."""
    path = tmp_path_factory.mktemp("reports") / "bare"
    script_checkpoint(path, CHAIN, tokenizer=SCRIPT_TOKENIZER, end_ids=())
    (path / "tokenizer_config.json").unlink()
    return serve(path, "--num-slots", "16384")
