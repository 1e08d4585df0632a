"""Requests at the edges of what is allowed, on a real server with a poisoned pool."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.models import rand_checkpoint
from tests.server import Server, running_server

VOCAB = 259
CONTEXT = 256
CHUNK = 32
SLOTS = 2048
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = rand_checkpoint(tmp_path_factory.mktemp("rand"), max_position=CONTEXT)
    flags = ["--num-slots", str(SLOTS), "--chunked-prefill-size", str(CHUNK), "--debug-poison-slots"]
    with running_server(folder, *flags, "--rounds-in-flight", "2") as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """The server, which must have all of its slots back after each test."""
    yield running
    assert running.get("/flush_cache").status == 200
    assert state(running)["free_slots"] == SLOTS
    assert "Traceback" not in running.log()


def state(server: Server) -> dict[str, Any]:
    info: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]
    return info


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def ask(server: Server, ids: list[int], sampling: dict[str, Any], **fields: Any) -> Any:
    answer = server.post("/generate", {"input_ids": ids, "sampling_params": sampling, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, CONTEXT - 2, CONTEXT - 1])
def test_prompts_and_outputs_at_the_limits(server: Server, length: int) -> None:
    ids = prompt(length, length)
    tops = VOCAB if length < 2 * CHUNK else 2
    everything = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": tops}
    for count in (0, 1, CONTEXT - length):
        answer = ask(server, ids, {**GREEDY, "max_new_tokens": count, "exit_threshold": 0.6}, **everything)
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": count}
        assert len(answer["output_ids"]) == len(meta["exit_depths"]) == count
        assert [i for _, i, _ in meta["input_token_logprobs"]] == ids
        assert [len(top or []) for top in meta["input_top_logprobs"]] == [0] + [tops] * (length - 1)
        assert [len(top) for top in meta["output_top_logprobs"]] == [tops] * count
    too_long = {"input_ids": ids, "sampling_params": {"max_new_tokens": CONTEXT - length + 1}}
    assert server.post("/generate", too_long).status == 400


def test_a_prompt_as_long_as_the_context(server: Server) -> None:
    for count in (0, 1):
        body = {"input_ids": prompt(CONTEXT), "sampling_params": {"max_new_tokens": count}}
        assert server.post("/generate", body).status == 400


@pytest.mark.parametrize("max_loops", [1, 2, 3])
def test_fewer_loops_than_the_model_has(server: Server, max_loops: int) -> None:
    for threshold, new_tokens in itertools.product((0.3, 1.0), (1, 2, 40)):
        sampling = {"max_loops": max_loops, "exit_threshold": threshold, "max_new_tokens": new_tokens}
        answer = ask(server, prompt(20), {**GREEDY, **sampling})
        first, *rest = answer["meta_info"]["exit_depths"]
        assert first == 4
        assert all(1 <= depth <= max_loops for depth in rest)


EXTREMES: list[dict[str, Any]] = [
    {"logit_bias": {"5": 1e308, "9": 1e308}, "temperature": 1e-6},
    {"logit_bias": {str(token): -1e308 for token in range(VOCAB)}},
    {"logit_bias": {str(token): -1e308 for token in range(VOCAB)}, "temperature": 1e-6, "top_p": 0.5},
    {"temperature": 1e308},
    {"temperature": 1e308, "min_new_tokens": 6, "ignore_eos": False},
    {"temperature": 1e308, "top_p": 1e-300, "top_k": 10**30, "min_p": 1.0},
    {"temperature": 1e-6, "repetition_penalty": 1e-300},
    {"temperature": 0.0, "repetition_penalty": 5e-324, "frequency_penalty": -2, "presence_penalty": -2},
    {"sampling_seed": -(1 << 63)},
    {"sampling_seed": (1 << 63) - 1},
    {"exit_threshold": 5e-324},
    {"exit_threshold": 1.0 - 1e-16},
]


@pytest.mark.parametrize("changes", EXTREMES, ids=range(len(EXTREMES)))
def test_extreme_numbers(server: Server, changes: dict[str, Any]) -> None:
    """They give the tokens asked for, with log-probabilities that are real ones."""
    sampling = {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 3, **changes}
    answer = ask(server, prompt(9), sampling, return_logprob=True, top_logprobs_num=3)
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert meta["completion_tokens"] == 6
    values = [value for value, _, _ in meta["output_token_logprobs"]]
    assert all(-1e31 < value <= 0.0 for value in values)
    best = [top[0][0] for top in meta["output_top_logprobs"]]
    # Of 259 ids the best one has at least the mean probability.
    assert all(value > -5.56 for value in best), best
    assert ask(server, prompt(9), sampling)["output_ids"] == answer["output_ids"]


def test_min_new_tokens_hold_back_the_ends(server: Server) -> None:
    free = ask(server, prompt(9), GREEDY)["output_ids"]
    ends = sorted(set(free))
    stopped = {**GREEDY, "ignore_eos": False, "stop_token_ids": ends}
    assert ask(server, prompt(9), stopped)["output_ids"] == free[:1]
    for minimum in (1, 2, 5, 6):
        answer = ask(server, prompt(9), {**stopped, "min_new_tokens": minimum})
        ids, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
        assert len(ids) >= minimum
        assert not set(ids[:minimum]) & set(ends)
        assert reason["type"] == ("stop" if ids[-1] in ends and len(ids) < 6 else "length")


def test_the_first_of_several_samples_may_be_aborted(server: Server) -> None:
    """The others wait for its prompt to be cached, and must not wait for ever."""
    for delay in (0.0, 0.01, 0.1):
        requests = state(server)["requests"]
        body = {
            "input_ids": prompt(200, seed=int(delay * 100)),
            "rid": "several",
            "sampling_params": {"max_new_tokens": 50, "ignore_eos": True, "n": 4},
        }
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(server.post, "/generate", body)
            wait_for(server, "requests", requests + 4)
            time.sleep(delay)
            assert server.post("/abort_request", {"rid": "several_0"}).status == 200
            answers = call.result(200).json()
        reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons[1:] == ["length"] * 3
        assert reasons[0] in ("abort", "length")


def test_stop_strings_that_cut_rows_which_ran_on(server: Server) -> None:
    """Many at once, so that most rows have gone on, or ended, when their stop string is found."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24, "exit_threshold": 0.6}
    cases = []
    for seed in range(8):
        ids = prompt(12, seed)
        whole = ask(server, ids, sampling)
        letters = [t - 3 for t in whole["output_ids"]]
        for at, byte in enumerate(letters):
            if 32 < byte < 127 and byte not in letters[:at]:
                cases.append((ids, whole, chr(byte), at + 1))
    assert len(cases) > 20

    def check(case: tuple[list[int], dict[str, Any], str, int]) -> None:
        ids, whole, stop, count = case
        answer = ask(server, ids, {**sampling, "stop": [stop]}, return_logprob=True)
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["output_ids"] == whole["output_ids"][:count]
        assert meta["exit_depths"] == whole["meta_info"]["exit_depths"][:count]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == count
        assert answer["text"] == whole["text"][: whole["text"].index(stop)]

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(check, case) for case in cases]:
            done.result(200)


def wait_for(server: Server, what: str, count: int) -> None:
    """Until the scheduler counts so many."""
    deadline = time.monotonic() + 100.0
    while state(server)[what] < count:
        assert time.monotonic() < deadline, state(server)
        time.sleep(0.002)


def test_priorities_go_first(server: Server) -> None:
    """While one request has the whole pool, others wait; then the higher priority starts first."""
    rows: list[int] = []

    def run(priority: int) -> None:
        ask(server, prompt(60, seed=priority), {**GREEDY, "max_new_tokens": 190}, priority=priority)
        rows.append(priority)

    with ThreadPoolExecutor(10) as pool:
        first = [pool.submit(run, 9) for _ in range(2)]  # two fill the pool
        wait_for(server, "running", 2)
        # Nothing goes on until all others wait.
        assert server.post("/pause_generation", {"mode": "in_place"}).status == 200
        calls = [pool.submit(run, priority) for priority in (-1, 0, 1, 2)]
        wait_for(server, "waiting", 4)
        assert server.post("/continue_generation", {}).status == 200
        for call in (*first, *calls):
            call.result(200)
    assert rows[:2] == [9, 9]
    assert set(rows[2:4]) == {2, 1}
    assert set(rows[4:]) == {0, -1}
