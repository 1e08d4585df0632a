"""Random schedules against the fake worker, which checks every slot that is read or granted."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_sgl.messages import FinishReason
from tests.utils_scheduler import Simulation, make_config

LOOPS = 4
PAUSES = [
    ["retract"],
    ["retract", "retract"],
    ["in_place", "retract"],
    ["retract", "in_place"],
    ["retract", "abort"],
]


def random_prompt(rng: random.Random, pool: list[list[int]], longest: int) -> list[int]:
    """A prompt that shares its beginning with earlier ones more often than not."""
    prompt: list[int] = []
    if pool and rng.random() < 0.7:
        base = rng.choice(pool)
        prompt = base[: rng.randrange(len(base) + 1)]
    prompt = prompt + [rng.randrange(3) for _ in range(rng.randrange(1, max(2, longest // 2)))]
    pool.append(prompt[:longest])
    return prompt[:longest]


def random_params(rng: random.Random, longest: int) -> dict[str, object]:
    low = rng.randrange(1, LOOPS + 1)
    options: dict[str, object] = {
        "max_new_tokens": rng.randrange(longest),
        "min_loops": low,
        "max_loops": rng.randrange(low, LOOPS + 1),
        "end_ids": [rng.randrange(30) for _ in range(rng.randrange(3))],
        "logprobs": rng.random() < 0.2,
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "extra_key": rng.choice([None, None, None, "a"]),
    }
    if rng.random() < 0.2:
        depths = [rng.randrange(1, LOOPS + 1) for _ in range(longest)]
        options |= {"exit_trace": [LOOPS, *depths], "min_loops": 1, "max_loops": LOOPS}
    if rng.random() < 0.2:
        options["prompt_logprob_start"] = rng.randrange(30)
    if rng.random() < 0.1:
        options["grammar"] = f"{rng.randrange(1, 9)} {rng.randrange(12)}"
    return options


def disturb(sim: Simulation, rng: random.Random) -> None:
    """Abort or stop some request, in whatever state it is."""
    running = [uid for uid, request in sim.scheduler.requests.items() if request.output_ids]
    uid = rng.choice(running) if running and rng.random() < 0.5 else rng.randrange(len(sim.answers))
    answer = sim.answers[uid]
    if answer.finished is not None:
        if rng.random() < 0.2:
            sim.scheduler.abort([uid])  # too late: nothing may happen
            sim.scheduler.stop(uid, 0)
        return
    if rng.random() < 0.5:
        sim.abort(uid)
    elif answer.tokens and answer.stopped_at is None:  # a frontend stops a request once
        sim.stop(uid, rng.randrange(1, len(answer.tokens) + 1))


def pause(sim: Simulation, rng: random.Random) -> None:
    """Retract, perhaps after or before another pause, perhaps for other weights; meanwhile requests may
    end or come."""
    for mode in rng.choice(PAUSES):
        sim.pause(mode)
        for _ in range(rng.choice([0, 1, 5, 40])):
            sim.tick()
        if rng.random() < 0.3:
            disturb(sim, rng)
        if rng.random() < 0.2:
            sim.submit([rng.randrange(3)], **random_params(rng, 16))
    info = sim.scheduler.info()
    assert (info["prefilling"], info["running"], info["reserved_slots"]) == (0, 0, 0)
    if rng.random() < 0.3:
        while sim.scheduler.info()["draining"]:  # the fake worker would miss what these rows read
            sim.tick()
        sim.update_weights()
    sim.resume()


def storm(
    sim: Simulation,
    rng: random.Random,
    count: int,
    longest: int = 40,
    disturbed: float = 0.2,
    paused: float = 0.0,
) -> None:
    pool: list[list[int]] = []
    group: list[tuple[list[int], dict[str, object], int]] = []
    while len(sim.answers) < count:
        if group:
            prompt, options, leader = group.pop()
            sim.submit(prompt, leader=leader, **options)
        else:
            prompt, options = random_prompt(rng, pool, longest), random_params(rng, 16)
            uid = sim.submit(prompt, **options)
            if rng.random() < 0.1:
                group = [(prompt, options, uid)] * rng.randrange(1, 5)
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            sim.tick()
        if rng.random() < disturbed:
            disturb(sim, rng)
        if paused and rng.random() < paused:
            pause(sim, rng)
    sim.run_until_done()


configs = st.fixed_dictionaries(
    {
        "kv_layout": st.sampled_from(["last_exited", "last_exited", "shared"]),
        "num_slots": st.sampled_from([64, 250, 600, 3000]),
        "max_rows": st.sampled_from([1, 3, 8]),
        "rounds_in_flight": st.integers(1, 8),
        "chunked_prefill_size": st.sampled_from([1, 3, 16, 64]),
        "max_prefill_tokens": st.sampled_from([None, 1, 30]),
        "max_chunks_ahead": st.integers(2, 3),
        "admission_scan_limit": st.sampled_from([1, 4, 64]),
        "max_admission_bypasses": st.sampled_from([0, 1, 8]),
        "max_queued_requests": st.sampled_from([None, None, 5]),
        "schedule_policy": st.sampled_from(["fcfs", "lpm"]),
        "radix_cache": st.sampled_from([True, True, False]),
        "radix_insert_generated": st.sampled_from(["never", "never", "full_depth", "always"]),
    }
)


@given(configs, st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.02]))
@settings(max_examples=100, deadline=None)
def test_any_schedule_on_any_settings(changes: dict[str, object], seed: int, error_rate: float) -> None:
    sim = Simulation(make_config(**changes), seed, error_rate)
    storm(sim, random.Random(seed), 40)


@given(configs, st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.02]))
@settings(max_examples=100, deadline=None)
def test_retractions_change_no_answer(changes: dict[str, object], seed: int, error_rate: float) -> None:
    sim = Simulation(make_config(**changes), seed, error_rate)
    storm(sim, random.Random(seed), 40, paused=0.2)
    retractions = sum(answer.retractions for answer in sim.answers.values())
    assert sim.scheduler.info()["retractions"] == retractions


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_a_storm_of_2000_requests_in_a_pool_ten_times_too_small(layout: str) -> None:
    # 16 rows of about 30 + 8 positions and 4 loops would like to have 2,500 slots.
    config = make_config(max_rows=16, num_slots=250, kv_layout=layout, rounds_in_flight=4)
    sim = Simulation(config, seed=1, error_rate=0.001, check_every=20)
    storm(sim, random.Random(1), 2000)
    reasons = {answer.finished.reason for answer in sim.answers.values() if answer.finished is not None}
    assert reasons == set(FinishReason) - {FinishReason.NONE}
    assert sim.peak_rows >= 4
    if layout == "last_exited":
        assert sim.scheduler.info()["cached_tokens"] > 1000
        assert max(sim.bypassed.values()) == config.max_admission_bypasses
        sim.scheduler.pool.flush()
    assert len(sim.scheduler.pool.allocator) == config.num_slots


@pytest.mark.parametrize("mode", ["never", "full_depth", "always"])
def test_conversations_that_come_back_with_their_answers(mode: str) -> None:
    """Prompts that extend earlier outputs: the case in which generated columns are read."""
    rng = random.Random(2)
    sim = Simulation(make_config(num_slots=700, radix_insert_generated=mode), seed=2)
    turns = [sim.submit([uid], max_new_tokens=6, min_loops=3) for uid in range(6)]
    for _ in range(8):
        sim.run_until_done()
        for at, uid in enumerate(turns):
            answer = sim.answers[uid]
            prompt = [*answer.message.input_ids, *answer.tokens, rng.randrange(9)]
            options = {"max_new_tokens": 6, "min_loops": 2}
            turns[at] = sim.submit(prompt[-40:] if rng.random() < 0.1 else prompt, **options)
            sim.tick()
            if rng.random() < 0.1:
                disturb(sim, rng)
    sim.run_until_done()
    # Prompts alone are cached up to the last answer; generated tokens add the answers themselves.
    low, high = {"never": (380, 415), "full_depth": (405, 450), "always": (550, 650)}[mode]
    assert low < sim.scheduler.info()["cached_tokens"] < high
