"""Pausing, going on, and other weights, seen from the scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ouro_sgl.errors import IntegrityError
from ouro_sgl.messages import (
    ControlOp,
    ControlReply,
    ControlReq,
    FinishReason,
    GenerateReq,
    Profile,
    Profiled,
    RoundEvents,
    RowParams,
    StepPlan,
    WeightsUpdated,
)
from ouro_sgl.scheduler.scheduler import Scheduler
from tests.utils_scheduler import Simulation, make_config, make_scheduler

PROMPT = [5, 6, 7, 8, 9]


def control(scheduler: Scheduler, op: ControlOp, **arguments: Any) -> list[ControlReply]:
    scheduler.control(ControlReq(1, op, arguments), now=0.0)
    return scheduler.take_replies(0.0)


def run(sim: Simulation, ticks: int) -> None:
    for _ in range(ticks):
        sim.tick()


def test_pause_with_abort_ends_everything_and_new_requests_wait() -> None:
    sim = Simulation(make_config(max_rows=2), seed=1)
    uids = [sim.submit([*PROMPT, i], max_new_tokens=30) for i in range(4)]
    run(sim, 40)
    assert control(sim.scheduler, ControlOp.PAUSE, mode="abort") == [ControlReply(1, True)]
    for uid in uids:
        sim.answers[uid].aborted = True
    late = sim.submit(PROMPT, max_new_tokens=5)
    run(sim, 300)
    assert {sim.answers[uid].finished.reason for uid in uids} == {FinishReason.ABORT}  # type: ignore[union-attr]
    assert sim.answers[late].started is None
    assert sim.scheduler.info()["draining"] == 0
    assert sim.scheduler.info()["paused"]
    assert control(sim.scheduler, ControlOp.CONTINUE) == [ControlReply(1, True)]
    sim.run_until_done()


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_pause_in_place_keeps_rows_and_changes_no_token(layout: str) -> None:
    sim = Simulation(make_config(kv_layout=layout, num_slots=4000), seed=2)
    for i in range(6):
        sim.submit([*PROMPT, i] * 8, max_new_tokens=40)
        sim.submit([*PROMPT, i], max_new_tokens=40, grammar="5 50")
    run(sim, 120)
    control(sim.scheduler, ControlOp.PAUSE, mode="in_place")
    run(sim, 400)
    tokens = sum(len(answer.tokens) for answer in sim.answers.values())
    run(sim, 200)
    assert sum(len(answer.tokens) for answer in sim.answers.values()) == tokens
    assert 0 < tokens < 6 * 80
    control(sim.scheduler, ControlOp.CONTINUE)
    sim.run_until_done()


def test_a_paused_request_can_be_aborted_and_stopped() -> None:
    sim = Simulation(make_config(), seed=3)
    first, second = (sim.submit([*PROMPT, i], max_new_tokens=60) for i in range(2))
    run(sim, 100)
    control(sim.scheduler, ControlOp.PAUSE, mode="in_place")
    run(sim, 200)
    sim.abort(first)
    sim.stop(second, 1)
    run(sim, 200)
    assert sim.scheduler.idle
    control(sim.scheduler, ControlOp.CONTINUE)
    sim.run_until_done()


def test_weights_are_not_updated_while_requests_run() -> None:
    sim = Simulation(make_config(), seed=4)
    sim.submit(PROMPT, max_new_tokens=30)
    run(sim, 20)
    (reply,) = control(sim.scheduler, ControlOp.UPDATE_WEIGHTS, model_path="/new", weight_version=None)
    assert not reply.ok
    assert "pause first" in reply.message
    assert sim.scheduler.take_orders() == []
    sim.run_until_done()
    reply = sim.update_weights()
    assert reply.ok
    assert reply.info == {"weight_version": "1", "paused_requests": 0}


def test_nothing_runs_and_no_second_update_starts_during_an_update() -> None:
    scheduler = make_scheduler()
    sim = Simulation(make_config(), seed=5)
    scheduler = sim.scheduler
    arguments = {"model_path": "/new", "weight_version": "v2"}
    scheduler.control(ControlReq(1, ControlOp.UPDATE_WEIGHTS, arguments), now=0.0)
    assert scheduler.take_replies(0.0) == []
    uid = sim.submit(PROMPT, max_new_tokens=3)
    run(sim, 50)
    assert sim.answers[uid].started is None
    scheduler.control(ControlReq(2, ControlOp.UPDATE_WEIGHTS, arguments), now=0.0)
    (reply,) = scheduler.take_replies(0.0)
    assert (reply.control_id, reply.ok) == (2, False)
    scheduler.weights_updated(WeightsUpdated(False, "a tensor is missing"))
    (reply,) = scheduler.take_replies(0.0)
    assert (reply.control_id, reply.ok, reply.message) == (1, False, "a tensor is missing")
    assert scheduler.weight_version == "default"
    with pytest.raises(IntegrityError):
        scheduler.weights_updated(WeightsUpdated(True, ""))
    sim.run_until_done()
    assert sim.answers[uid].finished.weight_versions == ["default"]  # type: ignore[union-attr]


def test_cached_prefixes_of_other_weights_are_never_read() -> None:
    sim = Simulation(make_config(), seed=6)
    sim.submit(PROMPT * 4, max_new_tokens=3)
    sim.run_until_done()
    assert sim.scheduler.pool.radix.cached > 0
    assert sim.update_weights("v2").info["weight_version"] == "v2"
    assert sim.scheduler.pool.radix.cached == 0
    uids = [sim.submit(PROMPT * 4, max_new_tokens=3) for _ in range(2)]
    sim.run_until_done()
    assert [sim.answers[uid].finished.weight_versions for uid in uids] == [["v2"]] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(5))
def test_an_update_amid_paused_requests(seed: int) -> None:
    """Rows and locked prefixes of the old weights stay with their rows, and with them alone."""
    rng = random.Random(seed)
    sim = Simulation(
        make_config(num_slots=1500, radix_insert_generated=rng.choice(["never", "always"])), seed
    )
    before = [sim.submit(PROMPT * rng.randint(1, 9), max_new_tokens=40) for _ in range(12)]
    run(sim, rng.randint(50, 200))
    control(sim.scheduler, ControlOp.PAUSE, mode="in_place")
    run(sim, 200)
    held = [uid for uid in before if sim.answers[uid].started and not sim.answers[uid].finished]
    # What rows in place read keeps what it holds; the fake worker would not know it again else.
    kept = dict(sim.worker.holds)
    reply = sim.update_weights()
    sim.worker.holds = kept
    assert reply.info["paused_requests"] >= len(held) > 0
    generation = sim.scheduler._generation
    after = [sim.submit(PROMPT * rng.randint(1, 9), max_new_tokens=10) for _ in range(8)]
    control(sim.scheduler, ControlOp.CONTINUE)
    run(sim, 30)
    for request in sim.scheduler.requests.values():
        if request.generation == generation and request.node is not None:
            root = request.node
            while root.parent is not None:
                root = root.parent
            assert root.namespace == (generation, None)
    sim.run_until_done()
    for uid in held:
        assert sim.answers[uid].finished.weight_versions == ["default", "1"]  # type: ignore[union-attr]
    for uid in after:
        assert sim.answers[uid].finished.weight_versions == ["1"]  # type: ignore[union-attr]


# --------------------------------------------------------------------------- retraction


def pause(scheduler: Scheduler, mode: str) -> None:
    assert control(scheduler, ControlOp.PAUSE, mode=mode) == [ControlReply(1, True)]
    scheduler.check_integrity()


def resume(scheduler: Scheduler) -> None:
    assert control(scheduler, ControlOp.CONTINUE) == [ControlReply(1, True)]


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.step()
    assert plan is not None
    return plan


def token(scheduler: Scheduler, epoch: int, position: int, token_id: int, depth: int, chunk: int = 1) -> None:
    """An event of row 0."""
    scheduler.process_events(
        RoundEvents(0, 0, chunk, [0], [epoch], [position], [token_id], [depth], [FinishReason.NONE])
    )
    scheduler.check_integrity()


def three_tokens(**params: Any) -> Scheduler:
    """One request on row 0 with outputs 3, 4, 5 after 4, 1 and 3 loops, the last of them not sent."""
    scheduler = make_scheduler(max_rows=1, radix_cache=False)
    scheduler.add(GenerateReq(0, PROMPT, RowParams(**{"max_new_tokens": 8, **params})))
    scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 1))
    token(scheduler, 1, 4, 3, 4)
    token(scheduler, 1, 5, 4, 1)
    assert scheduler.take_output() is not None
    token(scheduler, 1, 6, 5, 3)
    scheduler.step()
    return scheduler


def test_a_retracted_row_drains_and_is_told_what_it_had() -> None:
    scheduler = three_tokens()
    free = len(scheduler.pool.allocator)
    pause(scheduler, "retract")
    batch = scheduler.take_output()
    assert batch is not None
    assert (batch.token_ids, batch.exit_depths, batch.finished) == ([5], [3], [])  # sent once
    plan = plan_of(scheduler)
    assert [(r.row, r.epoch) for r in plan.releases] == [(0, 1)]
    token(scheduler, 1, 7, 6, 4)  # of a round launched before: lost, and made again later
    scheduler.process_events(RoundEvents(plan.plan_id - 1, 5, 1))
    assert len(scheduler.pool.allocator) == free
    scheduler.process_events(RoundEvents(plan.plan_id, 6, 1))
    assert len(scheduler.pool.allocator) == scheduler.config.num_slots
    info = scheduler.info()
    assert (info["waiting"], info["running"], info["draining"], info["retractions"]) == (1, 0, 0, 1)
    assert scheduler.step() is None  # paused

    resume(scheduler)
    plan = plan_of(scheduler)
    (admit,) = plan.admits
    assert (admit.epoch, admit.input_ids) == (2, PROMPT)
    assert (admit.forced_ids, admit.forced_depths) == ([3, 4, 5], [4, 1, 3])
    assert plan.grants[0].widths == [1, 3, 4, 4]
    scheduler.process_events(RoundEvents(plan.plan_id, 6, 2))
    for position, token_id, depth in ((4, 3, 4), (5, 4, 1), (6, 5, 3)):
        token(scheduler, 2, position, token_id, depth, chunk=2)
        assert scheduler.take_output() is None
    token(scheduler, 2, 7, 6, 2, chunk=2)
    batch = scheduler.take_output()
    assert batch is not None
    assert (batch.started, batch.token_ids, batch.exit_depths) == ([], [6], [2])
    info = scheduler.info()
    assert (info["generated_tokens"], info["prompt_tokens"]) == (4, 5)
    scheduler.abort([0])
    batch = scheduler.take_output()
    assert batch is not None
    assert batch.finished[0].num_retractions == 1


def test_a_known_output_that_comes_back_changed_is_an_error() -> None:
    for token_id, depth in ((9, 4), (3, 3)):
        scheduler = three_tokens()
        pause(scheduler, "retract")
        scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 1))
        resume(scheduler)
        scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 2))
        with pytest.raises(IntegrityError, match="output 0 of request 0 was replayed"):
            token(scheduler, 2, 4, token_id, depth, chunk=2)


def test_a_retracted_request_needs_no_more_slots_than_it_is_known_to() -> None:
    """One and three slots for the positions that left after as many loops; and it is retracted once."""
    scheduler = three_tokens(max_new_tokens=7)
    pause(scheduler, "retract")
    (again,) = scheduler.requests.values()
    assert again.generated_need == 1 + 3 + 4 * 4
    pause(scheduler, "retract")
    assert scheduler.requests[0] is again  # it is on no row: nothing to retract
    assert scheduler.info()["retractions"] == 1


def test_retracted_requests_come_before_those_that_never_ran() -> None:
    scheduler = make_scheduler(max_rows=2)
    for uid, priority in enumerate((0, 0, 0, 1)):
        scheduler.add(GenerateReq(uid, [uid], RowParams(max_new_tokens=3), priority=priority))
        if uid == 1:
            plan_of(scheduler)
    assert [request.uid for request in scheduler.waiting] == [3, 2]
    pause(scheduler, "retract")
    assert [request.uid for request in scheduler.waiting] == [3, 0, 1, 2]


def test_siblings_go_on_waiting_for_a_leader_that_is_retracted() -> None:
    scheduler = make_scheduler(chunked_prefill_size=4)
    for uid in range(3):
        leader = 0 if uid else None
        scheduler.add(GenerateReq(uid, PROMPT, RowParams(max_new_tokens=3), leader=leader))
    plan_of(scheduler)
    pause(scheduler, "retract")
    resume(scheduler)
    plan = plan_of(scheduler)
    assert (len(plan.releases), len(plan.admits)) == (1, 1)
    scheduler.process_events(RoundEvents(plan.plan_id, 0, 2))  # chunks of the row that is gone
    scheduler.check_integrity()
    plan = plan_of(scheduler)
    assert not plan.admits
    scheduler.process_events(RoundEvents(plan.plan_id, 0, 4))
    assert [admit.cached_len for admit in plan_of(scheduler).admits] == [4, 4]


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("end", ["abort", "stop", "pause"])
def test_a_retracted_request_can_end_in_the_queue_and_in_its_replay(end: str, replays: bool) -> None:
    scheduler = three_tokens()
    pause(scheduler, "retract")
    scheduler.take_output()
    plan = plan_of(scheduler)
    scheduler.process_events(RoundEvents(plan.plan_id, 0, 1))
    if replays:
        resume(scheduler)
        plan = plan_of(scheduler)
        scheduler.process_events(RoundEvents(plan.plan_id, 0, 2))
        token(scheduler, 2, 4, 3, 4, chunk=2)
        token(scheduler, 2, 5, 4, 1, chunk=2)
    if end == "abort":
        scheduler.abort([0])
    elif end == "stop":
        scheduler.stop(0, 3 if replays else 2)
    else:
        pause(scheduler, "abort")
    batch = scheduler.take_output()
    assert batch is not None
    (finished,) = batch.finished
    tokens = 2 if end == "stop" and not replays else 3
    assert (finished.num_tokens, finished.num_retractions) == (tokens, 1)
    assert "prefill" not in (finished.message or "")
    plan = scheduler.step()
    assert (plan is not None) == replays
    if plan is not None:
        scheduler.process_events(RoundEvents(plan.plan_id, 9, 2))
    scheduler.check_integrity()
    assert scheduler.idle
    assert len(scheduler.pool.allocator) == scheduler.config.num_slots


def test_a_cut_replay_hands_to_the_cache_only_what_was_computed() -> None:
    sim = Simulation(make_config(radix_insert_generated="always"), seed=7)
    uid = sim.submit(PROMPT, max_new_tokens=40)
    while len(sim.answers[uid].tokens) < 20:
        sim.tick()
    sim.pause("retract")
    run(sim, 60)
    assert sim.scheduler.pool.radix.cached <= 4 * len(PROMPT)  # of the retracted row only its prompt
    sim.resume()
    while sim.scheduler.requests[uid].reached < 7:
        sim.tick()
    reached = sim.scheduler.requests[uid].reached
    sim.stop(uid, 15)
    sim.run_until_done()
    longer = sim.submit([*PROMPT, *sim.answers[uid].tokens[:15], 96], max_new_tokens=2)
    sim.run_until_done()
    assert sim.answers[longer].finished.cached_tokens == len(PROMPT) + reached - 1  # type: ignore[union-attr]


def test_nothing_is_flushed_while_a_retracted_request_waits() -> None:
    scheduler = three_tokens()
    pause(scheduler, "retract")
    scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 1))
    (reply,) = control(scheduler, ControlOp.FLUSH_CACHE)
    assert not reply.ok
    assert "0 requests run, 1 wait" in reply.message


def test_a_pause_that_retracts_nothing() -> None:
    scheduler = make_scheduler()
    pause(scheduler, "retract")
    assert scheduler.step() is None
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=1)))
    assert scheduler.step() is None
    pause(scheduler, "retract")
    resume(scheduler)
    (admit,) = plan_of(scheduler).admits
    assert (admit.forced_ids, scheduler.info()["retractions"]) == ([], 0)


def test_other_weights_for_retracted_requests() -> None:
    """Who had output is said to have run with both; who had none only ever ran with the new ones."""
    sim = Simulation(make_config(num_slots=3000, chunked_prefill_size=3), seed=8)
    first = sim.submit(PROMPT, max_new_tokens=40, prompt_logprob_start=0)
    while len(sim.answers[first].tokens) < 5:
        sim.tick()
    second = sim.submit([9, *PROMPT * 5], max_new_tokens=4, prompt_logprob_start=2)
    while not sim.scheduler.info()["prefilling"]:
        sim.tick()
    sim.pause("retract")
    run(sim, 100)
    assert sim.scheduler.info()["draining"] == 0
    # only what was not reported yet is asked for again
    assert [request.prompt_logprob_start for request in sim.scheduler.waiting] == [None, 2]
    reply = sim.update_weights("next")
    assert (reply.ok, reply.info["paused_requests"]) == (True, 2)
    assert sim.scheduler.pool.radix.cached == 0
    sim.resume()
    sim.run_until_done()
    assert sim.answers[first].finished.weight_versions == ["default", "next"]  # type: ignore[union-attr]
    assert sim.answers[second].finished.weight_versions == ["next"]  # type: ignore[union-attr]
    assert sim.answers[second].started.weight_versions == ["next"]  # type: ignore[union-attr]


def test_a_grammar_goes_on_where_it_was() -> None:
    """Its mask is sent when the prompt is done, or when it is found, and no other one before."""
    for seed in range(10):
        sim = Simulation(make_config(), seed=seed)
        uids = [sim.submit([*PROMPT, i], max_new_tokens=40, grammar="5 30") for i in range(3)]
        for _ in range(3):
            run(sim, 80)
            sim.pause("retract")
            run(sim, sim.rng.choice([0, 3, 30]))
            sim.resume()
        sim.run_until_done()
        assert {sim.answers[uid].finished.reason for uid in uids} == {FinishReason.STOP_GRAMMAR}  # type: ignore[union-attr]
        assert all(len(sim.answers[uid].tokens) == 30 for uid in uids)


def test_a_stop_in_the_midst_of_a_prompt_that_is_computed_again_caches_nothing_of_it() -> None:
    scheduler = make_scheduler(chunked_prefill_size=2, max_chunks_ahead=1, radix_insert_generated="always")
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=8)))
    for chunk in (1, 2, 3):
        scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, chunk))
    token(scheduler, 1, 4, 3, 4, chunk=3)
    pause(scheduler, "retract")
    scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 3))
    scheduler.pool.flush()
    resume(scheduler)
    plan_of(scheduler)
    scheduler.stop(0, 1)
    scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 4))
    scheduler.check_integrity()
    assert scheduler.idle
    assert scheduler.pool.radix.cached == 0


def test_a_request_that_waits_takes_nothing_of_older_weights() -> None:
    scheduler = make_scheduler(num_slots=150, schedule_policy="lpm")
    scheduler.add(GenerateReq(0, PROMPT, RowParams(max_new_tokens=20)))
    scheduler.process_events(RoundEvents(plan_of(scheduler).plan_id, 0, 1))
    scheduler.add(GenerateReq(1, [*PROMPT, 96], RowParams(max_new_tokens=20)))
    scheduler.step()
    assert scheduler.requests[1].match[1] == len(PROMPT)  # but there is no room
    pause(scheduler, "in_place")
    control(scheduler, ControlOp.UPDATE_WEIGHTS, model_path="/new", weight_version=None)
    scheduler.weights_updated(WeightsUpdated(True, "done"))
    assert [reply.ok for reply in scheduler.take_replies(0.0)] == [True]
    resume(scheduler)
    scheduler.process_events(RoundEvents(0, 0, 1, [0], [1], [4], [3], [4], [FinishReason.LENGTH]))
    (admit,) = plan_of(scheduler).admits
    assert admit.cached_len == 0


def test_retracted_requests_take_no_room_in_the_queue_while_their_rows_drain() -> None:
    scheduler = make_scheduler(max_rows=2, max_queued_requests=1)
    for uid in range(2):
        scheduler.add(GenerateReq(uid, PROMPT, RowParams(max_new_tokens=2)))
    scheduler.step()
    control(scheduler, ControlOp.PAUSE, mode="retract")
    scheduler.add(GenerateReq(2, PROMPT, RowParams(max_new_tokens=2)))
    scheduler.step()
    assert scheduler.info()["draining"] == 2
    scheduler.add(GenerateReq(3, PROMPT, RowParams(max_new_tokens=2)))
    assert set(scheduler.requests) == {0, 1, 2}
    batch = scheduler.take_output()
    assert batch is not None
    assert [(f.uid, f.status) for f in batch.finished] == [(3, 503)]


def test_profiles_are_orders_to_the_worker_and_answered_in_turn() -> None:
    scheduler = make_scheduler()
    scheduler.control(ControlReq(7, ControlOp.PROFILE, {"folder": "/traces"}), now=0.0)
    scheduler.control(ControlReq(8, ControlOp.PROFILE, {"folder": None}), now=0.0)
    assert scheduler.take_orders() == [Profile("/traces"), Profile(None)]
    assert scheduler.take_replies(100.0) == []
    scheduler.profiled(Profiled(True, "begun"))
    assert scheduler.take_replies(0.0) == [ControlReply(7, True, "begun")]
    scheduler.profiled(Profiled(False, "full"))
    assert scheduler.take_replies(0.0) == [ControlReply(8, False, "full")]
    with pytest.raises(IntegrityError, match="nobody asked for"):
        scheduler.profiled(Profiled(True, "again"))
