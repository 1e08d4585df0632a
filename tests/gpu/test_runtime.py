"""The whole CUDA worker against itself in every mode, in any company and on any schedule."""

from __future__ import annotations

import random

import pytest
import torch

from ouro_sgl.messages import RowParams
from ouro_sgl.worker.worker import WorkerSettings
from tests.gpu.cuda_driver import CudaModel, Mode
from tests.models import rand_checkpoint
from tests.reference.test_exactness import make_requests
from tests.reference.test_worker_reference import add_lookahead
from tests.worker_driver import Driver, Request, retracted, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

LENGTH = 256
MODES = [
    Mode(),
    Mode(graphs=False),
    Mode(single_stream=False),
    Mode(power_of_two=True),
    Mode(graphs=False, static_buffers=False),
]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CudaModel:
    folder = rand_checkpoint(
        tmp_path_factory.mktemp("rand"),
        hidden=128,
        intermediate=256,
        heads=4,
        kv_heads=2,
        dtype=request.param,
    )
    add_lookahead(folder, 128)
    return CudaModel(folder, getattr(torch, request.param))


@pytest.mark.parametrize("model", ["bfloat16", "float32"], indirect=True)
@pytest.mark.parametrize("shared", [False, True], ids=["last_exited", "shared"])
def test_any_schedule_and_mode_gives_the_same_bits(model: CudaModel, shared: bool) -> None:
    requests = make_requests(16, seed=1)
    plain = WorkerSettings(max_rows=1, max_length=LENGTH, shared_layout=shared)
    # one row: each runs alone
    expected = [result.comparable() for result in run(model, requests, plain, max_chunk=512, eager=True)]
    assert sum(len(result[0]) for result in expected) > 60
    for index, mode in enumerate(MODES):
        model.mode = mode
        for seed in (index, index + 100):
            rng = random.Random(seed)
            settings = WorkerSettings(
                max_rows=rng.choice([3, 8, 16]),
                max_length=LENGTH,
                rounds_in_flight=rng.choice([1, 2, 4, 8]),
                shared_layout=shared,
                min_coda_batch_size=rng.choice([1, 1, 3]),
            )
            got = run(
                model, requests, settings, seed, max_chunk=rng.choice([7, 64, 300]), reuse_prefixes=not shared
            )
            for place, (result, wanted) in enumerate(zip(got, expected, strict=True)):
                assert result.comparable() == wanted, (mode, seed, place)
    model.mode = Mode()


@pytest.mark.parametrize("model", ["bfloat16"], indirect=True)
@pytest.mark.parametrize("shared", [False, True], ids=["last_exited", "shared"])
def test_a_replayed_request_goes_on_with_the_same_bits(model: CudaModel, shared: bool) -> None:
    requests = make_requests(16, seed=3)
    plain = WorkerSettings(max_rows=1, max_length=LENGTH, shared_layout=shared)
    results = run(model, requests, plain, max_chunk=512, eager=True)
    for seed, mode in enumerate(MODES):
        model.mode = mode
        rng = random.Random(seed)
        batch = [retracted(*pair, rng) for pair in zip(requests, results, strict=True)]
        assert sum(len(request.forced_ids) for request in batch) > 30
        settings = WorkerSettings(
            max_rows=rng.choice([3, 16]),
            max_length=LENGTH,
            rounds_in_flight=rng.choice([1, 2, 4, 8]),
            shared_layout=shared,
            min_coda_batch_size=rng.choice([1, 3]),
        )
        found = run(model, batch, settings, seed, max_chunk=rng.choice([7, 300]), reuse_prefixes=not shared)
        for index, (got, wanted) in enumerate(zip(found, results, strict=True)):
            assert got.comparable() == wanted.comparable(), (mode, index)
    model.mode = Mode()


@pytest.mark.parametrize("model", ["bfloat16"], indirect=True)
def test_known_output_that_no_row_would_make_is_taken_as_it_is(model: CudaModel) -> None:
    """Graphs that were captured for rows without any read it too; a constrained row needs no mask there."""
    ids, depths = [200, 8, 31, 7], [4, 1, 3, 2]
    settings = WorkerSettings(max_rows=4, max_length=LENGTH, rounds_in_flight=2)
    requests = [
        Request(
            [5, 6, 7],
            RowParams(max_new_tokens=9, temperature=0.0, end_ids=[8], min_loops=2, max_loops=2),
            forced_ids=ids,
            forced_depths=depths,
        ),
        Request(
            [5, 6],
            RowParams(max_new_tokens=9, temperature=0.7, top_p=0.9, constrained=True),
            abort_after=len(ids),
            forced_ids=ids,
            forced_depths=depths,
        ),
    ]
    first, second = run(model, requests, settings, seed=1)
    assert (first.token_ids[:4], first.exit_depths[:4]) == (ids, depths)
    assert set(first.exit_depths[4:]) == {2}
    assert (second.token_ids, second.exit_depths) == (ids, depths)


@pytest.mark.parametrize("model", ["bfloat16"], indirect=True)
def test_new_weights_reach_the_captured_graphs(
    model: CudaModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = rand_checkpoint(
        tmp_path_factory.mktemp("other"),
        hidden=128,
        intermediate=256,
        heads=4,
        kv_heads=2,
        dtype="bfloat16",
        seed=7,
    )
    requests = make_requests(6, seed=4)
    settings = WorkerSettings(max_rows=4, max_length=LENGTH)
    other = CudaModel(folder, torch.bfloat16)
    expected = [result.comparable() for result in run(other, requests, settings, seed=1)]
    before = [result.comparable() for result in run(model, requests, settings, seed=1)]
    assert before != expected
    worker = model.worker(8192, settings)
    worker._executor.update_weights(folder)
    driver = Driver(worker, settings, model.config.total_loops, 8192, 1)
    assert [result.comparable() for result in driver.run(requests)] == expected
