"""Reported faults of chunked prefill and of results that are seen late."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.reports.runtime import Heard, Runtime
from tests.e2e.reports.support import NATIVE, Client, greedy
from tests.models import rand_checkpoint
from tests.worker_driver import Model

LENGTHS = [1, 2, 6, 7, 8, 13, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70]
# Chunk and budget of one step, in tokens; -1 as a chunk becomes one of the context's length.
SIZES = [(1, 16), (7, 64), (16, None), (64, 16), (4096, 16), (4096, 64)]
EARLY = {"max_new_tokens": 8, "exit_threshold": 0.7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    folder: Path = rand_checkpoint(tmp_path_factory.mktemp("rand"))
    return Model(folder)


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(length)] for length in lengths]


def answers(model: Model, inputs: list[list[int]], **settings: object) -> list[Heard]:
    """Answers to all of ``inputs``, sent at once."""
    runtime = Runtime(model, rows=6, **settings)  # type: ignore[arg-type]
    uids = [runtime.submit(ids, prompt_logprob_start=0, **EARLY) for ids in inputs]
    runtime.run()
    return [runtime.heard[uid] for uid in uids]


def test_ovl_01_no_chunk_size_changes_an_answer(model: Model) -> None:
    inputs = prompts(LENGTHS, 1)
    whole = answers(model, inputs, chunked_prefill_size=4096)
    for chunk, budget in SIZES:
        cut = answers(model, inputs, chunked_prefill_size=chunk, max_prefill_tokens=budget)
        for ids, one, other in zip(inputs, whole, cut, strict=True):
            where = f"{len(ids)} ids, chunk {chunk}, at most {budget}"
            assert len(one.ids) == EARLY["max_new_tokens"]
            assert one.bits() == other.bits(), where
            assert one.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            assert one.prompt_logprobs.values == other.prompt_logprobs.values, where


@pytest.mark.parametrize("server", ["script", "small"])
def test_ovl_03_over_http(server: str, request: pytest.FixtureRequest) -> None:
    """Synchronous rounds and rounds in flight; alone, in a batch, with n = 2 and streamed."""
    client: Client = request.getfixturevalue(server)
    counts = [1, 2, 3, 7]
    each = [greedy(count, ignore_eos=True) for count in counts]
    texts = ["5", "56", "567", "5678"]
    alone = [client.generate(text, sampling) for text, sampling in zip(texts, each, strict=True)]
    batch = client.generate(texts, each, return_logprob=True)
    for count, answer in zip(counts * 2, alone + batch, strict=True):
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == count
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": count}
        if "output_token_logprobs" in answer["meta_info"]:
            assert len(answer["meta_info"]["output_token_logprobs"]) == count
    for text, sampling, answer in zip(texts, each, alone, strict=True):
        samples = client.generate(text, {**sampling, "n": 2})
        last = client.stream_text(text, sampling).finish()[-1]
        for other in (*samples, last):
            assert other["output_ids"] == answer["output_ids"]


def test_ovl_06_endings_at_any_moment(small: Client) -> None:
    """Arrivals, aborts and hang-ups at random times in a pool that holds two or three of the requests."""
    rng = random.Random(6)
    kinds = []
    for index in range(12):
        ids = prompts([rng.randint(1, 100)], 60 + index)[0]
        sampling = greedy(rng.randint(1, 40), ignore_eos=True)
        kinds.append((ids, sampling, small.solo(ids, sampling)["output_ids"]))
    pids = small.pids()

    def one(number: int, kind: int, wait: float, fate: float) -> str:
        ids, sampling, expected = kinds[kind]
        time.sleep(wait)
        body = {"input_ids": ids, "sampling_params": sampling, "rid": f"storm-{number}"}
        stream = small.stream(NATIVE, body)
        if fate < 0.4:
            time.sleep(fate)
            small.abort(rid=f"storm-{number}")
        elif fate < 0.5:
            with contextlib.suppress(AssertionError):  # it may have ended by itself
                stream.wait_chunks(2)
            stream.close()
            return "hung up"
        chunks = stream.finish()
        ends = [chunk["meta_info"]["finish_reason"] for chunk in chunks if "meta_info" in chunk]
        assert [end is not None for end in ends] == [False] * (len(ends) - 1) + [True]
        got = chunks[-1]["output_ids"]
        if ends[-1]["type"] == "abort":
            assert got == expected[: len(got)]
        else:
            assert got == expected
        reason: str = ends[-1]["type"]
        return reason

    calls = [(number, rng.randrange(len(kinds)), 4.0 * rng.random(), rng.random()) for number in range(100)]
    outcomes = small.at_once([lambda call=call: one(*call) for call in calls])
    assert {"abort", "length", "hung up"} <= set(outcomes)
    assert small.is_idle()
    state = small.get("/server_info").json()["internal_states"][0]
    assert (state["free_slots"], state["free_rows"]) == (state["num_slots"], state["rows"])
    answer = small.generate(prompts([299], 7)[0], greedy(1))
    assert answer["meta_info"]["prompt_tokens"] == 299
    assert small.pids() == pids
    log = small.server.log()
    assert "Traceback" not in log
    assert " ERROR " not in log


@pytest.mark.parametrize("rounds_in_flight", [1, 2, 4])
def test_ovl_03_never_a_token_too_many(model: Model, rounds_in_flight: int) -> None:
    runtime = Runtime(model, rounds_in_flight=rounds_in_flight)
    counts = [1, 2, 3, 7]
    for count, ids in zip(counts, prompts([9] * 4, 2), strict=True):
        heard = runtime.answer(ids, max_new_tokens=count, exit_threshold=0.7)
        assert len(heard.ids) == len(heard.logprobs) == len(heard.depths) == count
    together = [
        (count, runtime.submit(ids, max_new_tokens=count, exit_threshold=0.7))
        for count, ids in zip(counts * 4, prompts([9] * 16, 3), strict=True)
    ]
    runtime.run()
    for count, uid in together:
        heard = runtime.heard[uid]
        assert len(heard.ids) == len(heard.logprobs) == len(heard.depths) == count


def test_ovl_05_the_first_step_after_a_full_hit_reads_the_right_slots(model: Model) -> None:
    """Sixteen whole-prompt hits at once, while other requests take every slot that becomes free."""
    shared = prompts([24] * 4, 4)
    strangers = iter(prompts([17] * 60, 5))
    found = []
    for rounds_in_flight in (1, 4):
        # Little room beside the hits: the strangers live on slots that were just given back. Slots that
        # are handed out hold NaN until they are written, so a read of a freed one would show.
        runtime = Runtime(model, num_slots=16 * 100, rows=20, rounds_in_flight=rounds_in_flight)
        cold = [runtime.answer(ids, **EARLY) for ids in shared]
        assert [heard.cached_tokens for heard in cold] == [0] * 4
        warm: list[list[Heard]] = []
        for _ in range(6):
            uids = [runtime.submit(ids, **EARLY) for ids in shared for _ in range(4)]
            for _ in range(4):
                runtime.submit(next(strangers), **EARLY)
                runtime.turn()
            runtime.run()
            warm.append([runtime.heard[uid] for uid in uids])
        strangers = iter(prompts([17] * 60, 5))
        for part in warm:
            for index, heard in enumerate(part):
                assert heard.cached_tokens == 23
                assert heard.bits() == cold[index // 4].bits()
        found.append([heard.bits() for heard in cold])
    assert found[0] == found[1]
