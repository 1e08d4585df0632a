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
    WeightsUpdated,
)
from tests.utils_scheduler import Simulation, make_config, make_scheduler

PROMPT = [5, 6, 7, 8, 9]


def control(sim: Simulation, op: ControlOp, **arguments: Any) -> list[ControlReply]:
    sim.scheduler.control(ControlReq(1, op, arguments), now=0.0)
    return sim.scheduler.take_replies(0.0)


def run(sim: Simulation, ticks: int) -> None:
    for _ in range(ticks):
        sim.tick()


def test_pause_with_abort_ends_everything_and_new_requests_wait() -> None:
    sim = Simulation(make_config(max_rows=2), seed=1)
    uids = [sim.submit([*PROMPT, i], max_new_tokens=30) for i in range(4)]
    run(sim, 40)
    assert control(sim, ControlOp.PAUSE, mode="abort") == [ControlReply(1, True)]
    for uid in uids:
        sim.answers[uid].aborted = True
    late = sim.submit(PROMPT, max_new_tokens=5)
    run(sim, 300)
    assert {sim.answers[uid].finished.reason for uid in uids} == {FinishReason.ABORT}  # type: ignore[union-attr]
    assert sim.answers[late].started is None
    assert sim.scheduler.info()["draining"] == 0
    assert sim.scheduler.info()["paused"]
    assert control(sim, ControlOp.CONTINUE) == [ControlReply(1, True)]
    sim.run_until_done()


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_pause_in_place_keeps_rows_and_changes_no_token(layout: str) -> None:
    sim = Simulation(make_config(kv_layout=layout, num_slots=4000), seed=2)
    for i in range(6):
        sim.submit([*PROMPT, i] * 8, max_new_tokens=40)
        sim.submit([*PROMPT, i], max_new_tokens=40, grammar="5 50")
    run(sim, 120)
    control(sim, ControlOp.PAUSE, mode="in_place")
    run(sim, 400)
    tokens = sum(len(answer.tokens) for answer in sim.answers.values())
    run(sim, 200)
    assert sum(len(answer.tokens) for answer in sim.answers.values()) == tokens
    assert 0 < tokens < 6 * 80
    control(sim, ControlOp.CONTINUE)
    sim.run_until_done()


def test_a_paused_request_can_be_aborted_and_stopped() -> None:
    sim = Simulation(make_config(), seed=3)
    first, second = (sim.submit([*PROMPT, i], max_new_tokens=60) for i in range(2))
    run(sim, 100)
    control(sim, ControlOp.PAUSE, mode="in_place")
    run(sim, 200)
    sim.abort(first)
    sim.stop(second, 1)
    run(sim, 200)
    assert sim.scheduler.idle
    control(sim, ControlOp.CONTINUE)
    sim.run_until_done()


def test_weights_are_not_updated_while_requests_run() -> None:
    sim = Simulation(make_config(), seed=4)
    sim.submit(PROMPT, max_new_tokens=30)
    run(sim, 20)
    (reply,) = control(sim, ControlOp.UPDATE_WEIGHTS, model_path="/new", weight_version=None)
    assert not reply.ok
    assert "pause first" in reply.message
    assert sim.scheduler.take_update() is None
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
    control(sim, ControlOp.PAUSE, mode="in_place")
    run(sim, 200)
    held = [uid for uid in before if sim.answers[uid].started and not sim.answers[uid].finished]
    # What rows in place read keeps what it holds; the fake worker would not know it again else.
    kept = dict(sim.worker.holds)
    reply = sim.update_weights()
    sim.worker.holds = kept
    assert reply.info["paused_requests"] >= len(held) > 0
    generation = sim.scheduler._generation
    after = [sim.submit(PROMPT * rng.randint(1, 9), max_new_tokens=10) for _ in range(8)]
    control(sim, ControlOp.CONTINUE)
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
