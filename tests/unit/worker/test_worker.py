"""Plans, stalls, retirement and waiting rows of the worker, on a script model: every answer known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ouro_sgl.messages import (
    Admit,
    Chunk,
    ExitMode,
    FinishReason,
    Grant,
    Mask,
    Release,
    RoundEvents,
    RowParams,
    Segment,
    StepPlan,
)
from ouro_sgl.worker.executor import Pending
from ouro_sgl.worker.prefill import ChunkResult, Prompt
from ouro_sgl.worker.rows import RowState
from ouro_sgl.worker.worker import Worker, WorkerSettings
from tests.models import chain_of, script_checkpoint
from tests.worker_driver import Model

T = 4
CHAIN = [*range(10, 60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return Model(script_checkpoint(tmp_path_factory.mktemp("script"), chain_of(CHAIN)))


def make(model: Model, **settings: int) -> Worker:
    return model.worker(2048, WorkerSettings(**{"max_rows": 4, "max_length": 128, **settings}))


def admission(row: int, epoch: int, prompt: list[int], params: RowParams, base: int) -> StepPlan:
    """Admit and prefill in one plan; prompt slots start at ``base``."""
    slots = list(range(base, base + T * len(prompt)))
    segment = Segment(row, epoch, 0, len(prompt), slots)
    return StepPlan(1, admits=[Admit(row, epoch, prompt, params)], chunks=[Chunk(1, [segment])])


def grant(row: int, epoch: int, start: int, count: int, base: int, width: int = T) -> Grant:
    return Grant(row, epoch, start, [width] * count, list(range(base, base + width * count)))


def numbered(plan: StepPlan, number: int) -> StepPlan:
    plan.plan_id = number
    for chunk in plan.chunks:
        chunk.chunk_id = number
    return plan


def run(worker: Worker, limit: int = 400) -> list[RoundEvents]:
    """Step until the worker is idle."""
    reports = []
    for _ in range(limit):
        report = worker.step()
        if report is not None:
            reports.append(report)
        if worker.idle:
            return reports
    raise AssertionError("the worker never became idle")


def tokens(reports: list[RoundEvents], row: int) -> list[int]:
    pairs = [pair for report in reports for pair in zip(report.rows, report.token_ids, strict=True)]
    return [token for at, token in pairs if at == row]


def test_plans_must_come_in_order(model: Model) -> None:
    worker = make(model)
    worker.apply(StepPlan(1))
    with pytest.raises(ValueError, match="plan 3 follows plan 1"):
        worker.apply(StepPlan(3))


def test_an_idle_worker_acknowledges_a_plan(model: Model) -> None:
    worker = make(model)
    worker.apply(StepPlan(1))
    assert [report.applied_plan for report in run(worker)] == [1]
    assert worker.step() is None


def test_a_row_stalls_without_grants_and_goes_on_with_them(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=6, temperature=0.0)
    worker.apply(admission(2, 7, [10, 11], params, 0))
    first = run(worker)
    assert tokens(first, 2) == [12]  # the first token needs no grant; its own K/V does
    assert worker.rows.state[2] == RowState.STALLED
    plan = StepPlan(2, grants=[grant(2, 7, 2, 2, 100)])
    worker.apply(plan)
    assert tokens(run(worker), 2) == [13, 14]
    worker.apply(StepPlan(3, grants=[grant(2, 7, 4, 3, 200)]))
    last = run(worker)
    assert tokens(last, 2) == [15, 16, 17]
    assert last[-1].applied_plan == 3
    assert [reason for report in last for reason in report.reasons][-1] == FinishReason.LENGTH
    assert worker.rows.state[2] == RowState.DONE


def test_grants_that_come_before_idle_rounds_are_read_wake_the_row(model: Model) -> None:
    worker = make(model, rounds_in_flight=3)
    worker.apply(admission(2, 7, [10, 11], RowParams(max_new_tokens=6, temperature=0.0), 0))
    first: list[RoundEvents] = []
    for _ in range(400):
        report = worker.step()
        first += [report] if report is not None else []
        if tokens(first, 2):
            break
    assert tokens(first, 2) == [12]
    worker.apply(StepPlan(2, grants=[grant(2, 7, 2, 5, 100)]))
    assert tokens(run(worker), 2) == [13, 14, 15, 16, 17]


def test_length_is_tested_before_end_ids(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=3, temperature=0.0, end_ids=[13])
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 1, 2, 100)]))
    reports = run(worker)
    assert tokens(reports, 0) == [11, 12, 13]
    assert reports[-1].reasons == [FinishReason.LENGTH]


def test_end_id_ends_the_row_on_the_device(model: Model) -> None:
    worker = make(model, rounds_in_flight=8)
    params = RowParams(max_new_tokens=20, temperature=0.0, end_ids=[13])
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 1, 19, 100)]))
    reports = run(worker)
    assert tokens(reports, 0) == [11, 12, 13]
    assert [reason for report in reports for reason in report.reasons][-1] == FinishReason.STOP_ID


def test_min_new_tokens_holds_end_ids_back(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=8, min_new_tokens=5, temperature=0.0, end_ids=[13])
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 1, 7, 100)]))
    got = tokens(run(worker), 0)
    assert got[:2] == [11, 12]
    assert 13 not in got[:5]
    assert len(got) >= 5


def test_max_new_tokens_zero_samples_nothing(model: Model) -> None:
    worker = make(model)
    worker.apply(admission(0, 1, [10, 11, 12], RowParams(max_new_tokens=0), 0))
    reports = run(worker)
    assert [report.retired_chunk for report in reports][-1] == 1
    assert tokens(reports, 0) == []
    assert worker.rows.state[0] == RowState.DONE


def test_a_released_row_makes_no_more_tokens_and_its_place_can_be_reused(model: Model) -> None:
    worker = make(model, rounds_in_flight=4)
    params = RowParams(max_new_tokens=30, temperature=0.0)
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 1, 3, 100)]))
    run(worker)
    worker.apply(StepPlan(3, releases=[Release(0, 1)], grants=[grant(0, 1, 4, 3, 200)]))
    reports = run(worker)
    assert tokens(reports, 0) == []
    assert reports[-1].applied_plan == 3
    worker.apply(numbered(admission(0, 2, [30], params, 300), 4))
    reports = run(worker)
    assert tokens(reports, 0) == [31]
    assert [epoch for report in reports for epoch in report.epochs] == [2]


def test_a_stale_release_is_ignored(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=2, temperature=0.0)
    worker.apply(numbered(admission(0, 5, [10], params, 0), 1))
    worker.apply(StepPlan(2, releases=[Release(0, 4)], grants=[grant(0, 5, 1, 1, 100)]))
    assert tokens(run(worker), 0) == [11, 12]


def test_a_plan_counts_as_applied_only_when_older_rounds_have_retired(model: Model) -> None:
    worker = make(model, rounds_in_flight=3)
    params = RowParams(max_new_tokens=30, temperature=0.0)
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 1, 29, 100)]))
    for _ in range(8):
        worker.step()  # rounds are in flight by now
    worker.apply(StepPlan(3, releases=[Release(0, 1)]))
    first = worker.step()
    assert first is not None
    assert first.applied_plan == 2
    assert run(worker)[-1].applied_plan == 3


@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_no_more_rounds_are_launched_than_allowed(model: Model, in_flight: int) -> None:
    worker = make(model, rounds_in_flight=in_flight)
    params = RowParams(max_new_tokens=30, temperature=0.0)
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 1, 29, 100)]))
    deepest = 0
    for _ in range(200):
        worker.step()
        deepest = max(deepest, len(worker._launched_rounds))
        if worker.idle:
            break
    assert worker.idle
    assert deepest <= in_flight


class Unfinished:
    """A chunk's work that ends when the test says so."""

    def __init__(self, work: Pending[ChunkResult]) -> None:
        self._work, self.over = work, False

    def done(self) -> bool:
        return self.over and self._work.done()

    def result(self) -> ChunkResult:
        return self._work.result()


@pytest.mark.parametrize(("one_stream", "long"), [(True, True), (True, False), (False, True)])
def test_turns_of_rounds_behind_a_long_chunk(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    one_stream: bool,
    long: bool,
) -> None:
    """On one stream T, and none while it is being launched."""
    decoding = 2
    worker = make(model, rounds_in_flight=12)
    monkeypatch.setattr("ouro_sgl.worker.worker.LONG_CHUNK", 2 if long else 100)
    monkeypatch.setattr(worker._executor, "one_stream", one_stream)
    params = RowParams(max_new_tokens=30, temperature=0.0)
    for row in range(decoding):
        worker.apply(numbered(admission(row, 1, [10, 11], params, 8 * row), row + 1))
        run(worker)
    plan = admission(decoding, 1, [10, 11], params, 8 * decoding)
    plan.admits += admission(decoding + 1, 1, [10, 11], params, 0).admits  # its chunk is not planned yet
    plan.grants = [grant(row, 1, 2, 29, 100 + 120 * row) for row in range(decoding)]
    launch = worker._executor.launch_chunk
    meanwhile = []
    works = []

    def layer_by_layer(
        chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None]
    ) -> Unfinished:
        for _ in range(20):
            between_layers()
        meanwhile.append(len(worker._launched_rounds) + worker._retired_round - before)
        works.append(Unfinished(launch(chunk, prompts, between_layers)))
        return works[-1]

    monkeypatch.setattr(worker._executor, "launch_chunk", layer_by_layer)
    worker.between_layers = worker.step
    before = worker._retired_round
    worker.apply(numbered(plan, decoding + 1))
    for _ in range(100):
        worker.step()
    behind = worker._retired_round + len(worker._launched_rounds) - before
    if not (one_stream and long):
        assert meanwhile[0] > 4
        assert behind > 20
        return
    assert (meanwhile, behind) == ([0], T)
    works[0].over = True
    for _ in range(100):
        worker.step()
    assert worker._retired_round + len(worker._launched_rounds) - before > behind + 20


def test_rows_wait_for_company_at_the_coda_but_at_most_t_rounds(model: Model) -> None:
    """min_coda_batch_size 2: row 0 leaves at loop 1 each time, row 1 runs all loops."""
    worker = make(model, min_coda_batch_size=2)
    early = RowParams(max_new_tokens=4, temperature=0.0, exit_mode=ExitMode.TRACE, exit_trace=[4, 1, 1, 1])
    late = RowParams(max_new_tokens=4, temperature=0.0, exit_mode=ExitMode.TRACE, exit_trace=[4, 4, 4, 4])
    worker.apply(numbered(admission(0, 1, [10], early, 0), 1))
    plan = admission(1, 1, [30], late, 300)
    plan.grants = [grant(0, 1, 1, 3, 100), grant(1, 1, 1, 3, 400)]
    worker.apply(numbered(plan, 2))
    reports = run(worker)
    assert tokens(reports, 0) == [11, 12, 13, 14]
    assert tokens(reports, 1) == [31, 32, 33, 34]
    together = [report.rows for report in reports if report.rows]
    assert [0, 1] in together  # they met
    depths = [pair for r in reports for pair in zip(r.rows, r.exit_depths, strict=True)]
    assert [depth for row, depth in depths if row == 0] == [4, 1, 1, 1]


def test_deeper_table_entries_point_to_the_exit_depth(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=3, temperature=0.0, exit_mode=ExitMode.TRACE, exit_trace=[4, 2, 3])
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 1, 2, 100)]))
    run(worker)
    assert worker.rows.slot_table[:, 0, 1].tolist() == [100, 101, 101, 101]
    assert worker.rows.slot_table[:, 0, 2].tolist() == [104, 105, 106, 106]


def test_layout_shared_collapses_the_prompt_when_it_retires(model: Model) -> None:
    worker = model.worker(2048, WorkerSettings(max_rows=2, max_length=128, shared_layout=True))
    params = RowParams(max_new_tokens=2, temperature=0.0)
    worker.apply(numbered(admission(0, 1, [10, 11], params, 0), 1))
    worker.apply(StepPlan(2, grants=[grant(0, 1, 2, 1, 100, width=1)]))
    assert tokens(run(worker), 0) == [12, 13]
    assert worker.rows.slot_table[:, 0, :3].tolist() == [[6, 7, 100]] * 4


def replaying(prompt: list[int], params: RowParams, ids: list[int], depths: list[int]) -> StepPlan:
    """Admission of a request on row 0 that was retracted, with all of its grants."""
    plan = admission(0, 1, prompt, params, 0)
    plan.admits[0].forced_ids, plan.admits[0].forced_depths = ids, depths
    widths = [*depths[1:], *[T] * (params.max_new_tokens - len(ids))]
    plan.grants = [Grant(0, 1, len(prompt), widths, list(range(100, 100 + sum(widths))))]
    return plan


def events(reports: list[RoundEvents]) -> list[tuple[int, int, int, FinishReason]]:
    """Position, token, exit depth and reason of all events."""
    return [
        event
        for r in reports
        for event in zip(r.positions, r.token_ids, r.exit_depths, r.reasons, strict=True)
    ]


@pytest.mark.parametrize(
    ("mode", "new_depth"),
    [(ExitMode.OURO, 2), (ExitMode.OURO_DELAYED, 3), (ExitMode.RANDOM_LOOKAHEAD, 2)],
)
def test_replayed_positions_take_their_tokens_and_depths_as_they_are(
    model: Model, mode: ExitMode, new_depth: int
) -> None:
    """Whatever the policy would do, and though an end id is among them; then the row goes on by itself."""
    worker = make(model)
    params = RowParams(
        max_new_tokens=7,
        temperature=0.0,
        end_ids=[13, 23],
        exit_mode=mode,
        exit_threshold=0.0,
        min_loops=2,
        max_loops=3,
        presence_penalty=0.1,
        exit_lambdas=True,
    )
    ids, depths = [40, 13, 20], [4, 1, 3]
    worker.apply(replaying([10, 11], params, ids, depths))
    found = events(run(worker))
    assert [position for position, *_ in found] == [1, 2, 3, 4, 5, 6]
    assert [token for _, token, _, _ in found] == [40, 13, 20, 21, 22, 23]
    assert [depth for _, _, depth, _ in found] == [4, 1, 3, *[new_depth] * 3]
    assert [reason for *_, reason in found] == [FinishReason.NONE] * 5 + [FinishReason.STOP_ID]
    assert worker.rows.output_counts[0].nonzero().squeeze(1).tolist() == [13, 20, 21, 22, 23, 40]
    assert worker.rows.slot_table[:, 0, 2:5].T.tolist() == [
        [100, 100, 100, 100],
        [101, 102, 103, 103],
        [*range(104, 104 + new_depth), *[103 + new_depth] * (T - new_depth)],
    ]


def test_replay_up_to_the_last_token_but_one(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=3, temperature=0.0)
    worker.apply(replaying([10], params, [30, 40], [4, 2]))
    found = events(run(worker))
    assert [(token, reason) for _, token, _, reason in found] == [
        (30, FinishReason.NONE),
        (40, FinishReason.NONE),
        (41, FinishReason.LENGTH),
    ]


def test_a_replayed_row_needs_no_mask_until_its_output_is_new(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=4, temperature=0.7, top_k=5, seed=3, constrained=True)
    plan = replaying([10], params, [30, 40], [4, 2])
    plan.masks = [Mask(0, 1, 2, bits(50))]
    worker.apply(plan)
    assert [token for _, token, *_ in events(run(worker))] == [30, 40, 50]
    assert worker.rows.state[0] == RowState.CODA
    worker.apply(StepPlan(2, masks=[Mask(0, 1, 3, bits(7))]))
    assert [token for _, token, *_ in events(run(worker))] == [7]


def test_the_next_request_on_the_row_is_not_replayed(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=3, temperature=0.0)
    worker.apply(replaying([10], params, [30, 40], [4, 2]))
    run(worker)
    plan = admission(0, 2, [10], params, 200)
    plan.grants = [grant(0, 2, 1, 2, 300)]
    worker.apply(numbered(plan, 2))
    assert tokens(run(worker), 0) == [11, 12, 13]


def test_values_that_are_not_finite_end_a_row_only_behind_its_known_output(tmp_path: Path) -> None:
    broken = Model(script_checkpoint(tmp_path, chain_of(CHAIN)))
    broken.model.lm_head.fill_(float("nan"))
    worker = make(broken)
    params = RowParams(max_new_tokens=5, temperature=0.9, top_p=0.5, logprobs=True, top_logprobs_num=2)
    worker.apply(replaying([10], params, [30, 40], [4, 2]))
    found = events(run(worker))
    assert [token for _, token, *_ in found][:2] == [30, 40]
    assert [reason for *_, reason in found] == [FinishReason.NONE, FinishReason.NONE, FinishReason.ERROR]


def bits(*ids: int) -> bytes:
    words = [0] * (-(-259 // 32))
    for token in ids:
        words[token // 32] |= 1 << (token % 32)
    return b"".join(word.to_bytes(4, "little") for word in words)


def test_a_constrained_row_waits_for_its_mask_and_holds_up_nobody(model: Model) -> None:
    worker = make(model)
    params = RowParams(max_new_tokens=3, temperature=0.0, constrained=True)
    worker.apply(numbered(admission(0, 1, [10], params, 0), 1))
    plan = admission(1, 1, [30], RowParams(max_new_tokens=3, temperature=0.0), 300)
    plan.grants = [grant(0, 1, 1, 2, 100), grant(1, 1, 1, 2, 400)]
    worker.apply(numbered(plan, 2))
    reports = run(worker)
    assert tokens(reports, 1) == [31, 32, 33]
    assert tokens(reports, 0) == []
    assert worker.rows.state[0] == RowState.CODA
    worker.apply(StepPlan(3, masks=[Mask(0, 1, 0, bits(258, 40))]))
    assert tokens(run(worker), 0) == [40]  # the lower of two masked-in ids with equal logits
    worker.apply(StepPlan(4, masks=[Mask(0, 1, 1, bits(41, 7))]))
    assert tokens(run(worker), 0) == [41]
    assert worker.rows.state[0] == RowState.CODA  # its loops have run; only the mask is missing
