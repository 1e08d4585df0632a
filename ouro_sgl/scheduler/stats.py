"""Totals since the start; nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from ouro_sgl.messages import FinishReason


@dataclass
class Stats:
    """Counters of one scheduler. Tokens are counted once, however often they are sent or computed."""

    requests: int = 0
    refused: int = 0
    retractions: int = 0
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of these, taken from the radix cache
    generated_tokens: int = 0
    loops: int = 0  # sum of the exit depths of generated tokens
    plans: int = 0
    chunks: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    worker: dict[str, float] = field(default_factory=dict)  # sums of RoundEvents.round_stats

    def count_finish(self, reason: FinishReason) -> None:
        name = reason.name.lower()
        self.finished[name] = self.finished.get(name, 0) + 1

    def count_rounds(self, round_stats: dict[str, float]) -> None:
        for name, value in round_stats.items():
            self.worker[name] = self.worker.get(name, 0) + value

    @property
    def mean_exit_depth(self) -> float:
        """Loops per generated token; 0 before the first."""
        return self.loops / self.generated_tokens if self.generated_tokens else 0.0
