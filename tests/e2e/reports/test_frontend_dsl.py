"""Reported faults of frontend programs, with the real ``sglang`` client.

Choice methods (DSL-03) are tested on exact log-probabilities in ``tests/e2e/test_sglang_programs.py``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.reports.support import LONG, Client, digits

sgl = pytest.importorskip("sglang")

pytestmark = [
    # SGLang's client warns of errors in its threads.
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
]

SECONDS = 100.0


@pytest.fixture
def backend(script: Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return sgl.RuntimeEndpoint(script.server.url)


def in_time(call: Callable[[], Any]) -> Any:
    """The result of ``call``, or its exception; a hang fails the test."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the program hangs"
    return found[0]


@sgl.function
def counting(s: Any, text: str = LONG, **sampling: Any) -> None:
    s += text
    s += sgl.gen("v", temperature=0, max_tokens=4, **sampling)


def assert_alive(backend: Any) -> None:
    assert in_time(lambda: counting.run(backend=backend)["v"]) == digits(4)


@pytest.mark.parametrize("begin", [None, ""])
@pytest.mark.parametrize("size", [0, 1, 2])
def test_dsl_01_fork_before_any_text(backend: Any, begin: str | None, size: int) -> None:
    @sgl.function
    def program(s: Any) -> None:
        if begin is not None:
            s += begin
        forks = s.fork(size)
        for fork in forks:
            fork += LONG + sgl.gen("v", temperature=0, max_tokens=2)
        values.extend(fork["v"] for fork in forks)

    values: list[str] = []
    in_time(lambda: program.run(backend=backend).sync())
    assert values == [digits(2)] * size
    assert_alive(backend)


@pytest.mark.parametrize("bad", [{"top_p": 0.0}, {"frequency_penalty": 9.0}, {"stop": ["x"] * 40}])
def test_dsl_04_a_refused_gen_is_told(backend: Any, bad: dict[str, Any]) -> None:
    state = in_time(lambda: counting.run(backend=backend, **bad))
    error = state if isinstance(state, Exception) else in_time(state.error)
    assert isinstance(error, Exception)
    assert next(iter(bad)) in str(error)
    assert_alive(backend)


def test_dsl_04_a_select_without_a_temperature(backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += LONG + sgl.select("v", choices=["6", "7"], temperature=None)  # type: ignore[arg-type]

    state = in_time(lambda: program.run(backend=backend))  # which the client itself refuses
    assert isinstance(in_time(state.error), Exception)
    assert isinstance(in_time(lambda: state["v"]), KeyError)
    assert_alive(backend)


def test_dsl_04_an_exception_after_a_gen(backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += LONG + sgl.gen("v", temperature=0, max_tokens=4)
        values.append(s["v"])
        raise LookupError("mine")

    values: list[str] = []
    assert isinstance(in_time(lambda: program.run(backend=backend)), LookupError)
    assert values == [digits(4)]
    assert_alive(backend)


def test_dsl_04_an_unknown_variable(backend: Any) -> None:
    state = in_time(lambda: counting.run(backend=backend))
    assert isinstance(in_time(lambda: state["nobody set this"]), KeyError)
    assert_alive(backend)


def test_dsl_04_a_batch_of_which_one_fails(backend: Any) -> None:
    items: list[dict[str, Any]] = [{"text": f"{index} {LONG}"} for index in range(5)]
    items[3]["top_p"] = 0.0
    states = in_time(lambda: counting.run_batch(items, backend=backend, num_threads=3))
    assert [state.text() for index, state in enumerate(states) if index != 3] == [
        f"{index} {LONG}{digits(4)}" for index in (0, 1, 2, 4)
    ]
    assert "top_p" in str(in_time(states[3].error))
    assert_alive(backend)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", [False, True])
def test_dsl_05_several_samples(backend: Any, stream: bool, role: bool) -> None:
    """The stock client cannot use a list: it must say so, and neither side may hang."""

    @sgl.function
    def program(s: Any) -> None:
        with s.assistant() if role else s.user():
            s += LONG
            s += sgl.gen("v", n=3, temperature=0, max_tokens=4)
        s += "x"

    state = in_time(lambda: program.run(backend=backend, stream=stream))
    if not isinstance(state, Exception):
        text, error = in_time(state.text), in_time(state.error)
        assert error is not None or digits(4) in str(text)
    assert_alive(backend)


@sgl.function
def mixed(s: Any, reading: threading.Event | None = None) -> None:
    s += "1. " + LONG + sgl.gen("v", temperature=0, max_tokens=50)
    s += " 2. x" + sgl.gen("w", temperature=0, max_tokens=8)
    s += " 3. " + LONG + sgl.select("u", choices=["7", "6"])
    s += "."
    if reading is not None:
        reading.wait(SECONDS)


MIXED = f"1. {LONG}{digits(50)} 2. x😀k 3. {LONG}6."


def test_dsl_07_streaming_a_program(backend: Any) -> None:
    state = mixed.run(backend=backend, stream=True)
    pieces = in_time(lambda: list(state.text_iter()))
    assert "".join(pieces) == MIXED == state.text()
    assert len(pieces) > 4
    reading = threading.Event()  # of a program that has ended the client shows no variable any more
    state = mixed.run(reading=reading, backend=backend, stream=True)
    for name, value in (("v", digits(50)), ("w", "😀k")):
        pieces = in_time(lambda name=name: list(state.text_iter(var_name=name)))
        assert "".join(pieces) == value == state[name]
        assert not any("\ufffd" in piece for piece in pieces)
    reading.set()


def test_dsl_07_two_iterators_on_one_state(backend: Any) -> None:
    state = mixed.run(backend=backend, stream=True)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append("".join(state.text_iter())), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "an iterator never ends"
    assert state.text() == MIXED
    # The client wakes one reader at a time; what both saw together is the text or its beginning.
    assert len(found) == 2
    assert MIXED in found


async def test_dsl_07_in_asyncio(backend: Any) -> None:
    state = mixed.run(backend=backend, stream=True)

    async def read() -> str:
        return "".join([piece async for piece in state.text_async_iter()])

    assert await asyncio.wait_for(read(), SECONDS) == MIXED


def test_dsl_07_iterators_end_after_an_error(backend: Any) -> None:
    state = counting.run(top_p=0.0, backend=backend, stream=True)
    assert in_time(lambda: list(state.text_iter(var_name="v"))) in ([], [""])
    assert isinstance(in_time(state.error), Exception)
    assert_alive(backend)
