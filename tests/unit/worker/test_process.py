"""The worker process's turn: what comes while a chunk is being launched."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ouro_sgl.messages import ShutdownReq, StepPlan, UpdateWeights
from ouro_sgl.worker.process import serve


class FakeWorker:
    """Launches one chunk in its first step, during which messages come and turns are taken."""

    idle = False

    def __init__(self, come: Callable[[], None]) -> None:
        self._come = come
        self.launching_chunk = False
        self.between_layers: Callable[[], None] = lambda: None
        self.log: list[Any] = []
        self._stepped = False

    def apply(self, plan: StepPlan) -> None:
        self.log.append(plan.plan_id)

    def update_weights(self, message: UpdateWeights) -> str:
        self.log.append((message.model_path, self.launching_chunk))
        return "updated"

    def step(self) -> None:
        if self._stepped:
            return
        self._stepped = self.launching_chunk = True
        self._come()
        for _ in range(3):
            self.between_layers()
        self.log.append("launched")
        self.launching_chunk = False


def test_new_weights_wait_for_a_chunk_that_is_half_launched() -> None:
    queue: list[Any] = [StepPlan(1)]
    sent: list[Any] = []

    def come() -> None:
        queue.extend([StepPlan(2), UpdateWeights("folder"), StepPlan(3), ShutdownReq()])

    def drain() -> list[Any]:
        taken = list(queue)
        queue.clear()
        return taken

    worker = FakeWorker(come)
    plans = SimpleNamespace(drain=drain, socket=SimpleNamespace(poll=lambda: None))
    serve(worker, plans, SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    assert worker.log == [1, 2, "launched", ("folder", False), 3]
    assert sent == ["updated"]
