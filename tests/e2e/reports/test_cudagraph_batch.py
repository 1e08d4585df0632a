"""Reported faults of batch sizes: answers must not depend on them, nor on captured graphs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ouro_sgl import Engine
from tests.e2e.reports.runtime import Runtime
from tests.e2e.reports.support import NATIVE, Client, greedy
from tests.models import rand_checkpoint
from tests.worker_driver import Model


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("others", [1, 3, 7, 15])
def test_cgr_03_answers_do_not_depend_on_the_batch(ouro: Client, others: int) -> None:
    first, *rest = prompts(others + 1, others)
    sampling = greedy(30, ignore_eos=True)

    def ask(ids: list[int], count: int) -> Any:
        body = {"input_ids": ids, "sampling_params": {**sampling, "max_new_tokens": count}}
        return ouro.post(NATIVE, {**body, "return_logprob": True}).json()

    solo = ouro.solo(first, sampling, return_logprob=True)
    calls = [lambda: ask(first, 30)]
    calls += [lambda ids=ids, count=5 + 3 * index: ask(ids, count) for index, ids in enumerate(rest)]
    answer = ouro.at_once(calls)[0]
    assert answer["output_ids"] == solo["output_ids"]
    for name in ("exit_depths", "output_token_logprobs"):
        assert answer["meta_info"][name] == solo["meta_info"][name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cgr_03_not_even_in_half_precision(ouro_model: Path, dtype: torch.dtype) -> None:
    """Stronger than asked: near ties do not flip in bfloat16 either."""
    torch.set_num_threads(1)
    model = Model(ouro_model, dtype)
    inputs = prompts(16, 3)
    fields = {"max_new_tokens": 12, "exit_threshold": 0.7}
    solo = Runtime(model, radix_cache=False)
    alone = [solo.answer(ids, **fields).bits() for ids in inputs]
    for size in (2, 4, 7, 16):
        batch = Runtime(model, radix_cache=False)
        uids = [batch.submit(ids, **fields) for ids in inputs[:size]]
        batch.run()
        assert [batch.heard[uid].bits() for uid in uids] == alone[:size], size


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rows", "largest", "sizes"), [(12, 4, (3, 4, 5, 7, 12)), (100, None, (99, 100))])
def test_cgr_02_batches_beyond_and_beside_the_captured_sizes(
    tmp_path: Path, rows: int, largest: int | None, sizes: tuple[int, ...]
) -> None:
    folder = rand_checkpoint(
        tmp_path / "model", hidden=128, heads=2, kv_heads=2, threshold=0.7, dtype="bfloat16"
    )
    settings: dict[str, Any] = {"device": "cuda", "num_slots": 65536, "max_running_requests": rows}
    sampling = greedy(24, ignore_eos=True)
    inputs = prompts(max(sizes), 2)

    def essence(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
        return answer["output_ids"], answer["meta_info"]["exit_depths"]

    with Engine(folder, cuda_graph_max_bs=largest, **settings) as engine:
        alone = [essence(engine.generate(input_ids=ids, sampling_params=sampling)) for ids in inputs]
        for size in sizes:
            found = engine.generate(input_ids=inputs[:size], sampling_params=sampling)
            assert [essence(answer) for answer in found] == alone[:size], size
