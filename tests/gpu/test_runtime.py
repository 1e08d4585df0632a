"""The whole CUDA worker: against the reference model in fp32, and against itself in every mode."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ouro_sgl.messages import RowParams
from ouro_sgl.models.reference import ReferenceModel
from ouro_sgl.models.weights import load_weights
from ouro_sgl.worker.worker import WorkerSettings
from tests.gpu.cuda_driver import CudaModel, Mode
from tests.models import rand_checkpoint
from tests.reference.test_exactness import make_requests
from tests.reference.test_worker_reference import add_lookahead, on_an_edge, random_params
from tests.worker_driver import Driver, Request, retracted, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LENGTH = 256
MODES = [
    Mode(),
    Mode(graphs=False),
    Mode(single_stream=True),
    Mode(power_of_two=True),
    Mode(graphs=False, static_buffers=False, single_stream=True),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The reference's products are small: on many cores more threads take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    made = CudaModel(folder, getattr(torch, request.param))
    made.folder = folder
    return made


@pytest.mark.parametrize("model", ["float32"], indirect=True)
@pytest.mark.parametrize("shared", [False, True], ids=["last_exited", "shared"])
def test_tokens_and_depths_equal_the_reference(model: CudaModel, shared: bool) -> None:
    rng = random.Random(5)
    weights = load_weights(model.folder, model.config, torch.float32, "cpu")
    reference = ReferenceModel(model.config, weights, lookahead=model.lookahead)
    requests = []
    for _ in range(25 if shared else 60):
        length = rng.choice([1, 2, 17, 63, 64, 65, 100, 130])
        params = random_params(rng, model.config.total_loops)
        if shared:
            params.max_new_tokens = min(params.max_new_tokens, 8)
        requests.append(Request([rng.randrange(259) for _ in range(length)], params))
    settings = WorkerSettings(max_rows=8, max_length=LENGTH, rounds_in_flight=3, shared_layout=shared)
    excused = 0
    for request, result in zip(requests, run(model, requests, settings, seed=3, max_chunk=48), strict=True):
        expected = reference.generate(
            request.input_ids, request.params, "shared" if shared else "last_exited"
        )
        if (result.token_ids, result.exit_depths) != (expected.output_ids, expected.exit_depths):
            assert on_an_edge(expected, result, request.params), (request, result, expected.exit_depths)
            excused += 1
    assert excused <= 1


@pytest.mark.parametrize("loops", [1, 2, 3, 6])
def test_any_number_of_loops(loops: int, tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path, hidden=128, intermediate=256, total_loops=loops)
    model = CudaModel(folder, torch.float32)
    reference = ReferenceModel(model.config, load_weights(folder, model.config, torch.float32, "cpu"))
    rng = random.Random(loops)
    requests = [
        Request(
            [rng.randrange(259) for _ in range(rng.choice([1, 17, 70]))],
            RowParams(max_new_tokens=8, temperature=0.0, max_loops=loops, exit_threshold=0.6),
        )
        for _ in range(8)
    ]
    settings = WorkerSettings(max_rows=4, max_length=LENGTH, rounds_in_flight=3)
    for request, result in zip(requests, run(model, requests, settings, seed=1), strict=True):
        expected = reference.generate(request.input_ids, request.params)
        same = (result.token_ids, result.exit_depths) == (expected.output_ids, expected.exit_depths)
        assert same or on_an_edge(expected, result, request.params)


@pytest.mark.parametrize("model", ["bfloat16", "float32"], indirect=True)
@pytest.mark.parametrize("shared", [False, True], ids=["last_exited", "shared"])
def test_any_schedule_and_mode_gives_the_same_bits(model: CudaModel, shared: bool) -> None:
    requests = make_requests(16, seed=1)
    plain = WorkerSettings(max_rows=1, max_length=LENGTH, shared_layout=shared)
    expected = [run(model, [r], plain, max_chunk=512, eager=True)[0].comparable() for r in requests]
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
    results = [run(model, [request], plain, max_chunk=512, eager=True)[0] for request in requests]
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
