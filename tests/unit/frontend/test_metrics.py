"""The text of ``/metrics``."""

from __future__ import annotations

from ouro_sgl.frontend.metrics import Metrics

LOAD = {
    "waiting": 5,
    "prefilling": 2,
    "running": 7,
    "num_slots": 1000,
    "free_slots": 300,
    "evictable_slots": 450,
}


def values(text: bytes) -> dict[str, float]:
    lines = (line for line in text.decode().splitlines() if not line.startswith("#"))
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_load_is_that_of_the_moment() -> None:
    metrics = Metrics("m")
    found = values(metrics.render(LOAD))
    assert (found["sglang:num_running_reqs"], found["sglang:num_queue_reqs"]) == (9, 5)
    assert found["sglang:token_usage"] == 0.25
    assert values(metrics.render({**LOAD, "waiting": 0}))["sglang:num_queue_reqs"] == 0


def test_without_a_load_only_totals_are_told() -> None:
    metrics = Metrics("m")
    metrics.render(LOAD)
    metrics.requests.inc()
    found = values(metrics.render())
    assert found["sglang:num_requests_total"] == 1
    assert all(name.endswith("_total") for name in found)
