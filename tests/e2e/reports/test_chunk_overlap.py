"""Reported faults of chunked prefill and of results that are seen late."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.e2e.reports.runtime import Heard, Runtime
from tests.models import rand_checkpoint
from tests.worker_driver import Model

LENGTHS = [1, 2, 6, 7, 8, 13, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70]
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
    for chunk, budget in [(1, None), (1, 16), (7, 16), (7, 64), (16, 64), (64, 16), (64, 64), (4096, 16), (4096, 64)]:
        cut = answers(model, inputs, chunked_prefill_size=chunk, max_prefill_tokens=budget)
        for ids, one, other in zip(inputs, whole, cut, strict=True):
            where = f"{len(ids)} ids, chunk {chunk}, at most {budget}"
            assert len(one.ids) == EARLY["max_new_tokens"]
            assert one.bits() == other.bits(), where
            assert one.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            assert one.prompt_logprobs.values == other.prompt_logprobs.values, where


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
