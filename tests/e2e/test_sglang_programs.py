"""Frontend programs of the real ``sglang`` package against a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ouro_sgl.messages import RowParams
from ouro_sgl.models.config import load_config
from ouro_sgl.models.reference import ReferenceModel
from ouro_sgl.models.weights import load_weights
from tests.models import byte_ids, chain_of, rand_checkpoint, script_checkpoint
from tests.server import Server, running_server

sgl = pytest.importorskip("sglang")

pytestmark = [
    # SGLang's client warns of errors in its threads.
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
]

METHODS = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized")
EMOJI = "\U0001f600"


@pytest.fixture(scope="module")
def script_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """After x: abcdef and the end; after y: GHIJ and the end; after z: an emoji and the end."""
    chain: dict[int, int | list[int]] = {
        **chain_of([*byte_ids("xabcdef"), 0], [*byte_ids("yGHIJ"), 0], [*byte_ids("z" + EMOJI), 0])
    }
    # A tie after x, which greedy decoding gives to a: SGLang's client takes a log-probability of
    # exactly 0 for a missing one, and select would not see that a follows x.
    chain[byte_ids("x")[0]] = byte_ids(b"a\xff")
    folder = script_checkpoint(tmp_path_factory.mktemp("script"), chain)
    with running_server(folder) as server:
        yield server


@pytest.fixture
def backend(script_server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return sgl.RuntimeEndpoint(script_server.url)


@sgl.function
def continued(s: Any, text: str, **sampling: Any) -> None:
    s += text
    s += sgl.gen("v", temperature=0, max_tokens=12, **sampling)


@sgl.function
def watched(s: Any, text: str, reading: threading.Event) -> None:
    """As :func:`continued`, but ends after ``reading`` is set: of a program that has ended the client
    shows no variable any more."""
    s += text
    s += sgl.gen("v", temperature=0, max_tokens=12)
    reading.wait(60)


def assert_alive(backend: Any) -> None:
    state = continued.run("x", backend=backend)
    assert state["v"] == "abcdef"


def test_gen(backend: Any) -> None:
    state = continued.run("say x", backend=backend)
    assert state.text() == "say xabcdef"
    meta = state.get_meta_info("v")
    assert meta["finish_reason"] == {"type": "stop", "matched": 0}
    assert meta["prompt_tokens"] == 5
    assert meta["exit_depths"] == [4] * 7


def test_gen_with_stop(backend: Any) -> None:
    assert continued.run("x", stop="de", backend=backend)["v"] == "abc"


@pytest.mark.parametrize(("prompt", "answer"), [("x", "abcdef"), ("z", EMOJI)])
def test_streaming(backend: Any, prompt: str, answer: str) -> None:
    reading = threading.Event()
    state = watched.run(prompt, reading, backend=backend, stream=True)
    pieces = state.text_iter(var_name="v")
    first = next(pieces)
    reading.set()
    assert first + "".join(pieces) == answer
    assert state["v"] == answer
    state = continued.run(prompt, backend=backend, stream=True)
    assert "".join(state.text_iter()) == state.text() == prompt + answer


async def test_streaming_in_asyncio(backend: Any) -> None:
    reading = threading.Event()
    state = watched.run("z", reading, backend=backend, stream=True)
    pieces = []
    async for piece in state.text_async_iter(var_name="v"):
        pieces.append(piece)
        reading.set()
    assert "".join(pieces) == EMOJI
    await asyncio.to_thread(state.sync)


def test_streaming_ends_after_an_error(backend: Any) -> None:
    state = continued.run("x", top_p=0.0, backend=backend, stream=True)
    assert "".join(state.text_iter(var_name="v")) == ""
    assert state.error() is not None
    assert_alive(backend)


def test_two_gens_and_a_select(backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "1. x" + sgl.gen("first", temperature=0, stop="d")
        s += " 2. y" + sgl.gen("second", temperature=0)
        s += " 3. x" + sgl.select("third", choices=["c", "b", "a"])
        s += "."

    for stream in (False, True):
        state = program.run(backend=backend, stream=stream)
        expected = "1. xabc 2. yGHIJ 3. xa."
        assert "".join(state.text_iter()) == expected
        assert (state["first"], state["second"], state["third"]) == ("abc", "GHIJ", "a")


@pytest.mark.parametrize("prefix", [None, "", "common "])
@pytest.mark.parametrize("size", [0, 1, 2])
def test_fork_and_join(backend: Any, prefix: str | None, size: int) -> None:
    @sgl.function
    def program(s: Any) -> None:
        if prefix is not None:
            s += prefix
            s.sync()
        forks = s.fork(size)
        for fork, start in zip(forks, "xy", strict=False):
            fork += start + sgl.gen("v", temperature=0, max_tokens=2)
        answers = [fork["v"] for fork in forks]
        forks.join()
        s += "|".join(answers)

    expected = {0: "", 1: "ab", 2: "ab|GH"}[size]
    assert program.run(backend=backend).text() == (prefix or "") + expected
    assert_alive(backend)


def test_run_batch_keeps_order_when_one_fails(backend: Any) -> None:
    items = [{"text": f"{index} {start}"} for index, start in enumerate("xyzxy")]
    items[2]["top_p"] = 0.0  # type: ignore[assignment]
    states = continued.run_batch(items, backend=backend)
    assert [state["v"] for index, state in enumerate(states) if index != 2] == [
        "abcdef",
        "GHIJ",
        "abcdef",
        "GHIJ",
    ]
    assert "top_p" in str(states[2].error())
    assert_alive(backend)


def test_exception_in_the_program(backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("v", temperature=0)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run(backend=backend)
    assert_alive(backend)


@pytest.mark.parametrize("stream", [False, True])
def test_n_is_a_clear_error_for_the_stock_client_and_never_a_hang(backend: Any, stream: bool) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("v", n=3, max_tokens=4, temperature=0)

    state = program.run(backend=backend, stream=stream)
    waiter = threading.Thread(target=state.text)
    waiter.start()
    waiter.join(100)
    assert not waiter.is_alive()
    if not stream:
        assert state.error() is not None
    assert_alive(backend)


def test_second_call_hits_the_radix_cache(backend: Any) -> None:
    backend.flush_cache()
    prefix = "a long common beginning of both prompts, "

    @sgl.function
    def program(s: Any) -> None:
        s += prefix
        s.sync()
        forks = s.fork(2)
        forks[0].__iadd__("x" + sgl.gen("v", temperature=0, max_tokens=2))
        forks[1].__iadd__("y" + sgl.gen("v", temperature=0, max_tokens=2))
        assert [fork["v"] for fork in forks] == ["ab", "GH"]
        cached.append([fork.get_meta_info("v")["cached_tokens"] for fork in forks])
        s += sgl.select("w", choices=["x", "y"])

    cached: list[list[int]] = []
    for _ in range(2):
        program.run(backend=backend).sync()
    # fork(2) has committed the prefix before the first call already; the second finds all but the last token.
    assert cached == [[len(prefix)] * 2, [len(prefix)] * 2]


def test_server_info(backend: Any) -> None:
    info = backend.get_server_info()
    assert isinstance(info, dict)
    assert info


def test_own_endpoint_limits_the_loops(script_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from ouro_sgl import RuntimeEndpoint

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for limits, depth in [
        ({}, 4),
        ({"max_loops": 3}, 3),
        ({"exit_threshold": 0.6}, 2),  # the gate of a script model says 0.5 after every loop
        ({"exit_threshold": 0.5}, 1),
        ({"exit_threshold": 0.5, "min_loops": 3}, 3),
    ]:
        endpoint = RuntimeEndpoint(script_server.url, **limits)  # type: ignore[arg-type]
        state = continued.run("x", backend=endpoint)
        assert state["v"] == "abcdef"
        assert state.get_meta_info("v")["exit_depths"] == [4] + [depth] * 6


# --------------------------------------------------------------------------- choices

PROMPT = "Choose: "
CHOICES = ["rhlh", "yo", "anr", "smuff", "haygr", "hmqls", "vi", "owk", "pdaj", "mkmc", "k", "odigz"]


def expected_picks(folder: Path) -> list[list[str]]:
    """For every next three of CHOICES, what each method of SGLang picks on exact logprobs."""
    torch.set_num_threads(1)
    config = load_config(folder)
    model = ReferenceModel(config, load_weights(folder, config, torch.float32, "cpu"))

    def logprobs(ids: list[int]) -> list[float | None]:
        rows = model.generate(ids, RowParams(max_new_tokens=0)).prompt_logits.log_softmax(-1)
        return [None, *(rows[i - 1, ids[i]].item() for i in range(1, len(ids)))]

    start = len(PROMPT) - 2
    # One set of values for the prompt: the greedy method compares for equality, and the reference,
    # unlike the server, may round a shared prefix differently in each choice.
    shared = logprobs(byte_ids(PROMPT))
    triples, unconditional = [], []
    for choice in CHOICES:
        ids = byte_ids(PROMPT + choice)
        values = shared + logprobs(ids)[len(shared) :]
        triples.append(list(zip(values, ids, strict=True))[start:])
        unconditional.append([(value, None) for value in logprobs(ids[start:])])
    picks = []
    for first in range(0, len(CHOICES), 3):
        part = slice(first, first + 3)
        means = [sum(value or 0.0 for value, _ in row) / len(row) for row in triples[part]]
        picks.append(
            [
                getattr(sgl, method)(
                    choices=CHOICES[part],
                    normalized_prompt_logprobs=means,
                    input_token_logprobs=triples[part],
                    output_token_logprobs=[[], [], []],
                    unconditional_token_logprobs=unconditional[part],
                ).decision
                for method in METHODS
            ]
        )
    return picks


def test_choice_methods_pick_what_their_formulas_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = rand_checkpoint(tmp_path)
    expected = expected_picks(folder)
    assert any(len(set(picks)) == 3 for picks in expected), "the choices do not tell the methods apart"

    @sgl.function
    def program(s: Any, choices: list[str], method: str) -> None:
        s += PROMPT
        s += sgl.select("v", choices=choices, choices_method=getattr(sgl, method))

    with running_server(folder) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        for index, picks in enumerate(expected):
            choices = CHOICES[3 * index : 3 * index + 3]
            found = [program.run(choices=choices, method=method, backend=backend)["v"] for method in METHODS]
            assert found == picks, choices
        for method in METHODS:
            assert program.run(choices=["one"], method=method, backend=backend)["v"] == "one"
            assert program.run(choices=["ab", "ab"], method=method, backend=backend)["v"] == "ab"
