"""The CUDA worker against the reference model: greedy tokens and exit depths, fp32."""

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
from tests.gpu.cuda_driver import CudaModel
from tests.models import rand_checkpoint
from tests.reference.test_worker_reference import add_lookahead, on_an_edge, random_params
from tests.worker_driver import Request, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

LENGTH = 256


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The reference's products are small: on many cores more threads take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shared", [False, True], ids=["last_exited", "shared"])
def test_tokens_and_depths_equal_the_reference(tmp_path: Path, shared: bool) -> None:
    folder = rand_checkpoint(tmp_path, hidden=128, intermediate=256, heads=4, kv_heads=2)
    add_lookahead(folder, 128)
    model = CudaModel(folder, torch.float32)
    rng = random.Random(5)
    weights = load_weights(folder, model.config, torch.float32, "cpu")
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
