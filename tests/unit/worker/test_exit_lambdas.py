"""The exit gate's values, reported for the rows that ask, in every exit mode."""

from __future__ import annotations

import pytest
import torch

from ouro_sgl.messages import Admit, Chunk, ExitMode, RoundEvents, RowParams, Segment, StepPlan
from ouro_sgl.worker.worker import WorkerSettings
from tests.models import chain_of, script_checkpoint
from tests.unit.worker.test_worker import T, grant, run
from tests.worker_driver import Model

CHAIN = [*range(10, 60)]
HAZARDS = {10: 0.1, 11: 0.2, 12: 0.9, 13: 0.4, 14: 0.6, 15: 0.3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return Model(script_checkpoint(tmp_path_factory.mktemp("script"), chain_of(CHAIN), hazards=HAZARDS))


def reported(reports: list[RoundEvents], row: int) -> list[tuple[int, list[float] | None]]:
    """(exit depth, gate values) of the events of ``row``."""
    return [
        (report.exit_depths[index], report.exit_lambdas.get(index))
        for report in reports
        for index, at in enumerate(report.rows)
        if at == row
    ]


def run_two(model: Model, params: RowParams, chunks: list[tuple[int, int]]) -> list[RoundEvents]:
    """Row 0 with ``params``, row 1 the same without a wish for gate values; prompts of three tokens."""
    worker = model.worker(2048, WorkerSettings(max_rows=4, max_length=128))
    silent = RowParams(max_new_tokens=params.max_new_tokens, temperature=0.0, exit_threshold=0.5)
    prompt = [10, 11, 12]
    plan = StepPlan(1, admits=[Admit(0, 1, prompt, params), Admit(1, 2, prompt, silent)])
    for number, (start, end) in enumerate(chunks, start=1):
        segments = [
            Segment(row, row + 1, start, end, [100 * row + T * start + i for i in range(T * (end - start))])
            for row in (1, 0)
        ]
        plan.chunks.append(Chunk(number, segments))
    plan.grants = [grant(0, 1, 3, 3, 500), grant(1, 2, 3, 3, 600)]
    worker.apply(plan)
    return run(worker)


@pytest.mark.parametrize("chunks", [[(0, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)]])
def test_one_value_per_loop_that_ran(model: Model, chunks: list[tuple[int, int]]) -> None:
    params = RowParams(max_new_tokens=4, temperature=0.0, exit_threshold=0.5, exit_lambdas=True)
    reports = run_two(model, params, chunks)
    events = reported(reports, 0)
    assert [depth for depth, _ in events] == [T, 2, 1, 2]  # .64, .6 and .51 reach the threshold
    for (depth, values), hazard in zip(events, (0.9, 0.4, 0.6, 0.3), strict=True):
        assert values == pytest.approx([hazard] * depth, abs=1e-4)
    assert [values for _, values in reported(reports, 1)] == [None] * 4


def test_modes_without_a_gate_report_it_all_the_same(model: Model) -> None:
    params = RowParams(
        max_new_tokens=4,
        temperature=0.0,
        exit_mode=ExitMode.TRACE,
        exit_trace=[T, 1, 3, 2],
        exit_lambdas=True,
    )
    events = reported(run_two(model, params, [(0, 3)]), 0)
    assert [depth for depth, _ in events] == [T, 1, 3, 2]
    for (depth, values), hazard in zip(events, (0.9, 0.4, 0.6, 0.3), strict=True):
        assert values == pytest.approx([hazard] * depth, abs=1e-4)
