"""Single rules of the scheduler, each in a few lines."""

import pytest

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import IntegrityError
from ouro_sgl.messages import (
    ControlOp,
    ControlReq,
    FinishReason,
    GenerateReq,
    RoundEvents,
    RowParams,
    SampleReq,
    StepPlan,
    TopLogprobs,
    WorkerReady,
)
from ouro_sgl.scheduler.config import SchedulerConfig
from ouro_sgl.scheduler.scheduler import FLUSH_PATIENCE, Scheduler
from tests.utils_scheduler import Simulation, expected_output, make_config, make_scheduler

PROMPT = [5, 6, 7, 8, 9]


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.step()
    assert plan is not None
    return plan


def started(config_changes: dict[str, object], prompt: list[int], **params: object) -> Scheduler:
    """A scheduler with one request on row 0 whose only chunk has retired."""
    scheduler = make_scheduler(**config_changes)
    scheduler.add(GenerateReq(0, prompt, RowParams(**{"max_new_tokens": 8, **params})))
    plan = plan_of(scheduler)
    assert [c.chunk_id for c in plan.chunks] == [1]
    scheduler.process_events(RoundEvents(plan.plan_id, 0, 1))
    scheduler.check_integrity()
    return scheduler


def token(scheduler: Scheduler, position: int, depth: int, reason: int = 0, token_id: int = 3) -> None:
    """An event of row 0, first epoch."""
    scheduler.process_events(
        RoundEvents(0, 0, 1, [0], [1], [position], [token_id], [depth], [FinishReason(reason)])
    )
    scheduler.check_integrity()


# --------------------------------------------------------------------------- settings


def test_settings_are_resolved_against_the_worker() -> None:
    ready = WorkerReady(4, 97, 512, 600, 8, 2, False, {"chunked_prefill_size": 300})
    config = SchedulerConfig.resolve(ServerArgs(), ready)
    assert (config.total_loops, config.num_slots, config.max_rows, config.rounds_in_flight) == (4, 600, 8, 2)
    assert (config.chunked_prefill_size, config.max_chunks_ahead, config.radix_cache) == (300, 2, True)
    args = ServerArgs(kv_layout="shared", max_prefill_batches_before_decode=3)
    config = SchedulerConfig.resolve(args, ready)
    assert (config.max_chunks_ahead, config.radix_cache) == (4, False)
    assert not SchedulerConfig.resolve(ServerArgs(disable_radix_cache=True), ready).radix_cache


# --------------------------------------------------------------------------- plans


def test_one_request_from_plan_to_plan() -> None:
    scheduler = make_scheduler()
    assert scheduler.step() is None
    scheduler.add(GenerateReq(7, PROMPT, RowParams(max_new_tokens=3)))
    plan = plan_of(scheduler)
    assert (plan.plan_id, len(plan.admits), len(plan.chunks)) == (1, 1, 1)
    admit, segment, grant = plan.admits[0], plan.chunks[0].segments[0], plan.grants[0]
    assert (admit.row, admit.epoch, admit.input_ids, admit.cached_len) == (0, 1, PROMPT, 0)
    assert (segment.start, segment.end, len(segment.slots)) == (0, 5, 20)
    assert (grant.start, grant.widths) == (5, [4, 4])  # the last of 3 tokens has no K/V
    assert len({*segment.slots, *grant.slots}) == 28
    assert scheduler.step() is None
    assert scheduler.take_output() is None


def test_grants_run_ahead_and_stop_at_the_limit() -> None:
    scheduler = started({"rounds_in_flight": 2}, PROMPT, max_new_tokens=8)
    assert scheduler.requests[0].granted_until == 5 + 4
    token(scheduler, 4, 4)
    assert scheduler.step() is None
    granted = []
    for position in range(5, 11):
        token(scheduler, position, 2)
        plan = scheduler.step()
        granted += (
            [] if plan is None else [p for g in plan.grants for p in range(g.start, g.start + len(g.widths))]
        )
    assert granted == [9, 10, 11]
    token(scheduler, 11, 1, FinishReason.LENGTH)
    assert scheduler.step() is None
    assert scheduler.idle
    assert scheduler.pool.reserved == 0


def test_slots_of_one_depth_are_neighbours() -> None:
    """Those of positions that are read together, though few of them are granted at a time."""
    scheduler = make_scheduler(rounds_in_flight=2, num_slots=1024)
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=50)))
    plan = plan_of(scheduler)
    scheduler.process_events(RoundEvents(plan.plan_id, 0, 1))
    granted = list(plan.grants)
    for position in range(4, 54):
        token(scheduler, position, 4, FinishReason.LENGTH if position == 53 else FinishReason.NONE)
        following = scheduler.step()
        granted += following.grants if following is not None else []
    columns: list[list[int]] = [[], [], [], []]
    for grant in granted:
        assert len(grant.widths) <= 4  # so that a pause is soon felt
        assert set(grant.widths) == {4}
        for depth, column in enumerate(columns):
            column += grant.slots[depth::4]
    for column in columns:
        assert len(column) == 49
        apart = [at for at in range(48) if column[at + 1] != column[at] + 1]
        assert apart == [15, 31, 47]


def test_slots_of_loops_that_were_not_run_come_back_at_once() -> None:
    scheduler = started({}, PROMPT)
    before = len(scheduler.pool.allocator)
    token(scheduler, 4, 4)
    assert len(scheduler.pool.allocator) == before
    token(scheduler, 5, 1)
    assert len(scheduler.pool.allocator) == before + 3


def test_shared_frees_the_prompt_when_it_collapses() -> None:
    scheduler = make_scheduler(kv_layout="shared", num_slots=64)
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=4)))
    plan = plan_of(scheduler)
    assert not plan.grants  # T * P slots are all that was reserved: more comes with the collapse
    assert len(scheduler.pool.allocator) == 64 - 20
    scheduler.process_events(RoundEvents(1, 0, 1))
    assert len(scheduler.pool.allocator) == 64 - 5
    assert plan_of(scheduler).grants[0].widths == [1, 1, 1]
    scheduler.check_integrity()


def test_at_most_two_chunks_are_ahead() -> None:
    scheduler = make_scheduler(chunked_prefill_size=2)
    scheduler.add(GenerateReq(0, list(range(9)), RowParams(max_new_tokens=1)))
    assert [c.chunk_id for c in plan_of(scheduler).chunks] == [1, 2]
    assert scheduler.step() is None
    scheduler.process_events(RoundEvents(1, 0, 1))
    assert [c.chunk_id for c in plan_of(scheduler).chunks] == [3]


def test_max_prefill_tokens_bounds_what_is_admitted_but_not_a_single_prompt() -> None:
    scheduler = make_scheduler(max_prefill_tokens=10)
    for uid, size in enumerate((30, 4, 4)):
        scheduler.add(GenerateReq(uid, [uid] * size, RowParams(max_new_tokens=1)))
    assert [a.row for a in plan_of(scheduler).admits] == [0]
    scheduler.process_events(RoundEvents(1, 0, 2))
    assert len(plan_of(scheduler).admits) == 2


def test_equal_calls_give_equal_plans() -> None:
    runs = []
    for _ in range(2):
        sim = Simulation(make_config(num_slots=300), seed=3)
        plans = []
        sim._check_fairness = plans.append  # type: ignore[method-assign]
        for uid in range(30):
            sim.submit([uid % 5] * (uid % 20 + 1), max_new_tokens=uid % 9)
            sim.tick()
        sim.run_until_done()
        runs.append(plans)
    assert runs[0] == runs[1]
    assert [plan.plan_id for plan in runs[0]] == list(range(1, len(runs[0]) + 1))


# --------------------------------------------------------------------------- refusal


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_what_can_never_fit_is_refused_with_the_numbers(layout: str) -> None:
    scheduler = make_scheduler(num_slots=40, kv_layout=layout)
    fits = 5 if layout == "last_exited" else 31  # output tokens of a prompt of 10 and of 6
    prompt = [1] * (10 if layout == "shared" else 6)
    scheduler.add(GenerateReq(0, prompt, RowParams(max_new_tokens=fits + 1)))
    batch = scheduler.take_output()
    assert batch is not None
    (finished,) = batch.finished
    assert (finished.reason, finished.status, finished.num_tokens) == (FinishReason.ERROR, 400, 0)
    assert finished.message is not None
    assert "40" in finished.message
    assert str(len(prompt)) in finished.message
    scheduler.add(GenerateReq(1, prompt, RowParams(max_new_tokens=fits)))
    assert len(plan_of(scheduler).admits) == 1


def test_malformed_requests_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(GenerateReq(0, [], RowParams(max_new_tokens=1)))
    scheduler.add(GenerateReq(1, [1], RowParams(max_new_tokens=3, exit_trace=[4, 1])))
    batch = scheduler.take_output()
    assert batch is not None
    assert [f.status for f in batch.finished] == [400, 400]
    assert scheduler.idle


def test_a_full_queue_answers_503() -> None:
    scheduler = make_scheduler(max_rows=1, max_queued_requests=1)
    for uid in range(3):
        scheduler.add(GenerateReq(uid, PROMPT, RowParams(max_new_tokens=2)))
        scheduler.step()
    batch = scheduler.take_output()
    assert batch is not None
    assert [(f.uid, f.status) for f in batch.finished] == [(2, 503)]
    scheduler.abort([1])
    scheduler.step()
    scheduler.add(GenerateReq(3, PROMPT, RowParams(max_new_tokens=2)))
    assert set(scheduler.requests) == {0, 3}
    scheduler = make_scheduler(max_rows=2, max_queued_requests=0)
    for uid in range(3):
        scheduler.add(GenerateReq(uid, PROMPT, RowParams(max_new_tokens=2)))
    assert set(scheduler.requests) == {0, 1}  # both go at once, so neither waits


# --------------------------------------------------------------------------- endings


def test_a_row_that_ended_on_the_device_is_free_at_its_event() -> None:
    scheduler = started({"radix_cache": False}, PROMPT)
    token(scheduler, 4, 4, FinishReason.STOP_ID, token_id=2)
    assert scheduler.idle
    assert len(scheduler.pool.allocator) == scheduler.config.num_slots
    batch = scheduler.take_output()
    assert batch is not None
    assert (batch.token_ids, batch.exit_depths, batch.counts) == ([2], [4], [1])
    assert (batch.finished[0].reason, batch.finished[0].matched) == (FinishReason.STOP_ID, 2)
    assert scheduler.step() is None  # no release is needed


def test_an_aborted_row_drains_before_anything_is_reused() -> None:
    scheduler = started({"max_rows": 1, "radix_cache": False}, PROMPT)
    free = len(scheduler.pool.allocator)
    scheduler.abort([0, 99])
    batch = scheduler.take_output()
    assert batch is not None
    assert batch.finished[0].reason is FinishReason.ABORT
    scheduler.add(GenerateReq(1, PROMPT, RowParams(max_new_tokens=1)))
    plan = plan_of(scheduler)
    assert [(r.row, r.epoch) for r in plan.releases] == [(0, 1)]
    assert not plan.admits
    token(scheduler, 4, 4)  # a round launched before: dropped
    assert scheduler.take_output() is None
    assert len(scheduler.pool.allocator) == free
    scheduler.process_events(RoundEvents(plan.plan_id - 1, 5, 1))
    assert scheduler.step() is None
    scheduler.process_events(RoundEvents(plan.plan_id, 6, 1))
    admit = plan_of(scheduler).admits[0]
    assert (admit.row, admit.epoch) == (0, 2)
    token(scheduler, 5, 4)  # of the first epoch: dropped
    assert scheduler.take_output() is None


def test_an_aborted_prompt_waits_for_its_chunk_too() -> None:
    scheduler = make_scheduler(chunked_prefill_size=2)
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=1)))
    plan_of(scheduler)
    scheduler.abort([0])
    plan = plan_of(scheduler)
    assert plan.releases
    assert not plan.chunks
    scheduler.process_events(RoundEvents(plan.plan_id, 0, 1))
    assert not scheduler.idle
    scheduler.process_events(RoundEvents(plan.plan_id, 0, 2))
    assert scheduler.idle
    assert len(scheduler.pool.allocator) == scheduler.config.num_slots


def test_an_abort_in_the_queue_is_answered_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=1)))
    scheduler.abort([0])
    batch = scheduler.take_output()
    assert batch is not None
    assert batch.finished[0].reason is FinishReason.ABORT
    assert scheduler.idle
    assert scheduler.step() is None


def test_stop_cuts_the_output() -> None:
    scheduler = started({}, PROMPT, logprobs=True, top_logprobs_num=1)
    for position in range(4, 7):
        events = RoundEvents(0, 0, 1, [0], [1], [position], [position], [4], [FinishReason.NONE])
        events.logprobs[0] = -1.0
        events.tops[0] = TopLogprobs([-1.0], [position], [])
        scheduler.process_events(events)
    scheduler.stop(0, 2)
    batch = scheduler.take_output()
    assert batch is not None
    assert batch.token_ids == [4, 5]
    assert (len(batch.logprobs[0].values), len(batch.logprobs[0].tops)) == (2, 2)
    assert (batch.finished[0].reason, batch.finished[0].num_tokens) == (FinishReason.STOP_STRING, 2)
    assert plan_of(scheduler).releases


def test_stop_wins_over_an_end_that_was_not_reported() -> None:
    scheduler = started({}, PROMPT)
    token(scheduler, 4, 4)
    scheduler.take_output()
    token(scheduler, 5, 4, FinishReason.STOP_ID)
    scheduler.stop(0, 1)
    batch = scheduler.take_output()
    assert batch is not None
    (finished,) = batch.finished
    assert (finished.reason, finished.num_tokens, finished.matched) == (FinishReason.STOP_STRING, 1, None)
    scheduler.stop(0, 1)
    assert scheduler.take_output() is None
    assert scheduler.idle


def test_stop_beyond_the_known_tokens_is_cut_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = started({}, PROMPT)
    token(scheduler, 4, 4)
    scheduler.stop(0, 5)
    batch = scheduler.take_output()
    assert batch is not None
    assert batch.finished[0].num_tokens == 1
    assert "stop of request 0 after 5 tokens" in caplog.text


def test_a_failed_row_ends_alone() -> None:
    scheduler = started({}, PROMPT)
    token(scheduler, 4, 4)
    token(scheduler, 5, 2, FinishReason.ERROR)
    batch = scheduler.take_output()
    assert batch is not None
    assert batch.counts == [1]
    assert (batch.finished[0].reason, batch.finished[0].num_tokens) == (FinishReason.ERROR, 1)
    assert scheduler.idle


def test_no_tokens_wanted() -> None:
    scheduler = started({}, PROMPT, max_new_tokens=0)
    batch = scheduler.take_output()
    assert batch is not None
    assert (len(batch.started), batch.uids) == (1, [])
    assert (batch.finished[0].reason, batch.finished[0].num_tokens) == (FinishReason.LENGTH, 0)
    assert scheduler.idle
    assert scheduler.pool.radix.cached == 4 * len(PROMPT)


def test_a_dead_worker_ends_every_request_once() -> None:
    scheduler = started({"max_rows": 1}, PROMPT)
    scheduler.add(GenerateReq(1, PROMPT, RowParams(max_new_tokens=1)))
    scheduler.add(GenerateReq(2, PROMPT, RowParams(max_new_tokens=1), leader=1))
    scheduler.fail_all("worker died")
    batch = scheduler.take_output()
    assert batch is not None
    assert sorted(f.uid for f in batch.finished) == [0, 1, 2]
    assert {(f.reason, f.message) for f in batch.finished} == {(FinishReason.ERROR, "worker died")}
    scheduler.fail_all("again")
    assert scheduler.take_output() is None


def test_wrong_books_do_not_keep_a_request_from_its_end() -> None:
    scheduler = started({}, PROMPT, max_new_tokens=40)
    scheduler.add(GenerateReq(1, PROMPT, RowParams(max_new_tokens=40)))
    scheduler.step()
    scheduler.pool.reserved = 0
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()
    scheduler.fail_all("the books are wrong")
    batch = scheduler.take_output()
    assert batch is not None
    assert sorted(f.uid for f in batch.finished) == [0, 1]


@pytest.mark.parametrize("position", [3, 5])
def test_an_event_out_of_order_is_an_error(position: int) -> None:
    scheduler = started({}, PROMPT)
    with pytest.raises(IntegrityError, match=f"position {position}"):
        token(scheduler, position, 4)


# --------------------------------------------------------------------------- radix cache


def test_a_second_prompt_reuses_the_first_but_computes_its_last_token() -> None:
    sim = Simulation(make_config())
    first = sim.submit(list(range(20)))
    sim.run_until_done()
    same, longer = sim.submit(list(range(20))), sim.submit([*list(range(10)), 99])
    sim.run_until_done()
    cached = [sim.answers[uid].finished.cached_tokens for uid in (first, same, longer)]  # type: ignore[union-attr]
    assert cached == [0, 19, 10]


def test_prompts_of_one_token_and_the_cache_of_a_chunked_prompt() -> None:
    sim = Simulation(make_config(chunked_prefill_size=4))
    uids = []
    for prompt in ([3], [3], list(range(50)), list(range(50))):
        uids.append(sim.submit(prompt))
        sim.run_until_done()
    cached = [sim.answers[uid].finished.cached_tokens for uid in uids]  # type: ignore[union-attr]
    assert cached == [0, 0, 0, 49]


@pytest.mark.parametrize(
    ("start", "cached"), [(None, 19), (0, 0), (1, 0), (2, 1), (10, 9), (20, 19), (25, 19)]
)
def test_prompt_logprobs_bound_the_match(start: int | None, cached: int) -> None:
    sim = Simulation(make_config())
    sim.submit(list(range(20)))
    sim.run_until_done()
    uid = sim.submit(list(range(20)), prompt_logprob_start=start, top_logprobs_num=2, logprobs=True)
    sim.run_until_done()
    answer = sim.answers[uid]
    assert answer.started is not None
    assert answer.started.cached_tokens == cached
    found = answer.started.prompt_logprobs
    if start is not None and start < 20:
        assert found is not None
        assert len(found.tops) == len(found.values) == 20 - start
        assert found.tops.count(None) == (1 if start == 0 else 0)


def test_namespaces_and_switches_keep_prompts_apart() -> None:
    for changes, options in (
        ({"radix_cache": False}, {}),
        ({"kv_layout": "shared"}, {}),
        ({}, {"extra_key": "other"}),
    ):
        sim = Simulation(make_config(**changes))
        sim.submit(PROMPT)
        sim.run_until_done()
        uid = sim.submit(PROMPT, **options)
        sim.run_until_done()
        assert sim.answers[uid].finished.cached_tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize(("mode", "extra"), [("never", 0), ("full_depth", None), ("always", 6)])
def test_generated_tokens_in_the_cache(mode: str, extra: int | None, loops: int) -> None:
    sim = Simulation(make_config(radix_insert_generated=mode))
    sim.submit(PROMPT, max_new_tokens=7, min_loops=loops, max_loops=loops)
    sim.run_until_done()
    tokens = expected_output(PROMPT, RowParams(7, min_loops=loops, max_loops=loops), 4)[0]
    uid = sim.submit([*PROMPT, *tokens, 96], max_new_tokens=3)
    sim.run_until_done()
    if extra is None:
        extra = 6 if loops == 4 else 0
    assert sim.answers[uid].finished.cached_tokens == 5 + extra  # type: ignore[union-attr]


@pytest.mark.parametrize("end", [FinishReason.ERROR, FinishReason.ABORT])
def test_what_a_row_generated_before_it_failed_is_not_cached(end: FinishReason) -> None:
    scheduler = started({"radix_insert_generated": "always"}, PROMPT)
    token(scheduler, 4, 4)
    token(scheduler, 5, 4)
    if end is FinishReason.ERROR:
        token(scheduler, 6, 4, end)
    else:
        scheduler.abort([0])
        scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 1))
    scheduler.check_integrity()
    assert scheduler.idle
    assert scheduler.pool.radix.cached == 4 * len(PROMPT)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_request_that_waits_finds_what_was_cached_meanwhile(policy: str) -> None:
    scheduler = make_scheduler(max_rows=1, schedule_policy=policy)
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=1)))
    scheduler.add(GenerateReq(1, [*PROMPT, 96], RowParams(max_new_tokens=1)))
    assert len(plan_of(scheduler).admits) == 1
    scheduler.process_events(RoundEvents(1, 0, 1))
    scheduler.step()
    token(scheduler, 4, 4, FinishReason.LENGTH)
    (admit,) = plan_of(scheduler).admits
    assert admit.cached_len == len(PROMPT)


def test_siblings_wait_for_the_prompt_of_their_leader() -> None:
    scheduler = make_scheduler(chunked_prefill_size=4)
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=3)))
    scheduler.add(GenerateReq(1, PROMPT, RowParams(max_new_tokens=3), leader=0))
    scheduler.add(GenerateReq(2, PROMPT, RowParams(max_new_tokens=3), leader=0))
    assert len(plan_of(scheduler).admits) == 1
    scheduler.process_events(RoundEvents(1, 0, 1))
    assert scheduler.step() is None
    scheduler.process_events(RoundEvents(1, 0, 2))
    admits = plan_of(scheduler).admits
    assert [a.cached_len for a in admits] == [4, 4]
    scheduler.check_integrity()


def test_samples_are_their_leader_s_request_with_a_seed_of_their_own() -> None:
    scheduler = make_scheduler()
    first = GenerateReq(0, PROMPT, RowParams(max_new_tokens=3, seed=7, bias_ids=[5], bias_values=[1.0]))
    scheduler.add(first)
    scheduler.add_sample(SampleReq(1, 8))
    scheduler.abort([0])
    scheduler.add_sample(SampleReq(2, 9))  # its leader is long gone
    second, third = scheduler.requests[1], scheduler.requests[2]
    assert (second.params.seed, third.params.seed, first.params.seed) == (8, 9, 7)
    assert (second.leader, third.leader) == (0, 0)
    # However many there are, what they share exists once.
    assert second.input_ids is third.input_ids is first.input_ids
    assert second.params.bias_ids is third.params.bias_ids is first.params.bias_ids
    assert len(plan_of(scheduler).admits) == 2
    with pytest.raises(IntegrityError):
        make_scheduler().add_sample(SampleReq(1, 8))


def test_siblings_go_on_when_their_leader_ends_early() -> None:
    scheduler = make_scheduler()
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=3)))
    scheduler.add(GenerateReq(1, PROMPT, RowParams(max_new_tokens=3), leader=0))
    scheduler.abort([0])
    assert len(plan_of(scheduler).admits) == 1
    scheduler.add(GenerateReq(2, PROMPT, RowParams(max_new_tokens=3), leader=0))  # long gone
    assert len(plan_of(scheduler).admits) == 1


def test_without_a_cache_siblings_do_not_wait() -> None:
    scheduler = make_scheduler(radix_cache=False)
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=3)))
    scheduler.add(GenerateReq(1, PROMPT, RowParams(max_new_tokens=3), leader=0))
    assert len(plan_of(scheduler).admits) == 2


# --------------------------------------------------------------------------- control


def test_flush_when_idle_empties_the_cache() -> None:
    sim = Simulation(make_config())
    sim.submit(PROMPT)
    sim.run_until_done()
    sim.scheduler.control(ControlReq(4, ControlOp.FLUSH_CACHE), now=10.0)
    (reply,) = sim.scheduler.take_replies(now=10.0)
    assert (reply.control_id, reply.ok) == (4, True)
    assert len(sim.scheduler.pool.allocator) == sim.config.num_slots
    assert sim.scheduler.take_replies(now=10.0) == []


def test_flush_is_refused_while_anything_runs_or_waits() -> None:
    scheduler = started({}, PROMPT)
    cached = scheduler.pool.radix.cached
    scheduler.control(ControlReq(1, ControlOp.FLUSH_CACHE), now=0.0)
    (reply,) = scheduler.take_replies(now=0.0)
    assert not reply.ok
    assert "1 requests run, 0 wait" in reply.message
    assert scheduler.pool.radix.cached == cached
    scheduler = make_scheduler()
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=3)))
    scheduler.control(ControlReq(1, ControlOp.FLUSH_CACHE), now=0.0)
    assert not scheduler.take_replies(now=0.0)[0].ok


def test_flush_waits_for_rows_that_drain() -> None:
    scheduler = started({}, PROMPT)
    scheduler.abort([0])
    plan = plan_of(scheduler)
    assert scheduler.next_deadline() is None
    scheduler.control(ControlReq(1, ControlOp.FLUSH_CACHE), now=5.0)
    assert scheduler.take_replies(now=5.0) == []
    assert scheduler.next_deadline() == 5.0 + FLUSH_PATIENCE
    scheduler.process_events(RoundEvents(plan.plan_id, 1, 1))
    assert [r.ok for r in scheduler.take_replies(now=5.1)] == [True]
    assert scheduler.next_deadline() is None


def test_flush_gives_up_after_its_patience() -> None:
    scheduler = started({}, PROMPT)
    scheduler.abort([0])
    scheduler.control(ControlReq(1, ControlOp.FLUSH_CACHE), now=5.0)
    assert scheduler.take_replies(now=5.0 + FLUSH_PATIENCE / 2) == []
    (reply,) = scheduler.take_replies(now=5.0 + FLUSH_PATIENCE)
    assert not reply.ok
    assert "1 end" in reply.message


def test_info_adds_up() -> None:
    sim = Simulation(make_config())
    for _ in range(3):
        sim.submit(PROMPT, max_new_tokens=4, min_loops=2, max_loops=2)
        sim.run_until_done()
    sim.scheduler.add(GenerateReq(99, [], RowParams(max_new_tokens=1)))
    sim.scheduler.process_events(RoundEvents(0, 0, 0, round_stats={"rounds": 2.0}))
    sim.scheduler.process_events(RoundEvents(0, 0, 0, round_stats={"rounds": 3.0}))
    sim.scheduler.control(ControlReq(1, ControlOp.INFO), now=0.0)
    info = sim.scheduler.take_replies(now=0.0)[0].info
    expected = {
        "requests": 4,
        "refused": 1,
        "finished": {"length": 3},
        "prompt_tokens": 15,
        "cached_tokens": 8,
        "generated_tokens": 12,
        "mean_exit_depth": (4 + 2 + 2 + 2) / 4,
        "running": 0,
        "waiting": 0,
        "free_rows": 8,
        "worker": {"rounds": 5.0},
    }
    assert {name: info[name] for name in expected} == expected
    assert info["free_slots"] + info["evictable_slots"] == info["num_slots"]


def test_the_check_sees_a_row_that_is_lost() -> None:
    scheduler = started({}, PROMPT)
    scheduler.check_integrity()
    scheduler._free_rows.append(0)
    with pytest.raises(IntegrityError, match="free rows"):
        scheduler.check_integrity()
    scheduler._free_rows.pop()
    request = scheduler.requests.pop(0)
    with pytest.raises(IntegrityError, match="ended"):
        scheduler.check_integrity()
    scheduler.requests[0] = request
    request.reserved += 1
    with pytest.raises(IntegrityError, match="promised"):
        scheduler.check_integrity()
