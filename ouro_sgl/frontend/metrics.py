"""Counters of the frontend and the scheduler's load, in the text format of Prometheus.

The names are those of SGLang.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Totals since the start. Refused requests and health probes are in no other counter."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge per counter that says when it was made
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "num_requests", "sequences that were accepted and have ended", model_name
        )
        self.aborted = self._counter("num_aborted_requests", "sequences that ended by an abort", model_name)
        self.failed = self._counter("num_failed_requests", "sequences that ended with an error", model_name)
        self.refused = self._counter(
            "num_refused_requests",
            "calls that could be read and were refused, and sequences that could not be queued",
            model_name,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of ended sequences", model_name)
        self.cached_tokens = self._counter("cached_tokens", "prompt tokens found in the cache", model_name)
        self.generation_tokens = self._counter("generation_tokens", "tokens that were generated", model_name)
        self.generation_loops = self._counter(
            "generation_loops", "loops that generated tokens ran, all together", model_name
        )
        self._load = CollectorRegistry()
        self._running = self._gauge("num_running_reqs", "sequences that run, prompts included", model_name)
        self._waiting = self._gauge("num_queue_reqs", "sequences that wait for a row or for K/V", model_name)
        self._usage = self._gauge(
            "token_usage", "share of the K/V slots in use, the evictable cache not counted", model_name
        )

    def _counter(self, name: str, help_text: str, model_name: str) -> Counter:
        counter = Counter(f"sglang:{name}", help_text, ["model_name"], registry=self._registry)
        return counter.labels(model_name=model_name)

    def _gauge(self, name: str, help_text: str, model_name: str) -> Gauge:
        gauge = Gauge(f"sglang:{name}", help_text, ["model_name"], registry=self._load)
        return gauge.labels(model_name=model_name)

    def render(self, load: dict[str, Any] | None = None) -> bytes:
        """The text.

        Args:
            load: the scheduler's statistics of this moment; None: there are none, and the gauges are
                left out rather than out of date.
        """
        totals = generate_latest(self._registry)
        if load is None:
            return totals
        self._running.set(load["prefilling"] + load["running"])
        self._waiting.set(load["waiting"])
        self._usage.set(1 - (load["free_slots"] + load["evictable_slots"]) / load["num_slots"])
        return totals + generate_latest(self._load)
