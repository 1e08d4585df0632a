"""What the worker needs of a device: launch a round or a chunk now, read its result later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ouro_sgl.messages import Chunk, ExitMode
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import Head
from ouro_sgl.worker.attention import TorchAttention
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.prefill import ChunkResult, Prompt, run_chunk
from ouro_sgl.worker.round import RoundBlock, RoundRunner
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish
from ouro_sgl.worker.update import replace_weights

R = TypeVar("R", covariant=True)


class Pending(Protocol[R]):
    """Launched work. ``result`` may be called once, when ``done`` is true."""

    def done(self) -> bool: ...

    def result(self) -> R: ...


class Executor(Protocol):
    """What launches rounds and chunks for :class:`~ouro_sgl.worker.worker.Worker`, on one device."""

    one_stream: bool  # chunks run between rounds, not beside them

    def launch_round(self, running: int, wishes: dict[int, LogprobWish]) -> Pending[RoundBlock]:
        """One round; at most ``running`` rows can be live. ``wishes`` by row."""

    def launch_chunk(
        self, chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None]
    ) -> Pending[ChunkResult]:
        """``between_layers`` must be called often enough while launching takes host time."""

    def update_weights(self, folder: Path) -> None:
        """Run with the weights in ``folder`` from the next launch on.

        Raises:
            ConfigError: they are not of this model's shapes, or not readable; nothing has changed.
        """

    def decoding(self) -> AbstractContextManager[object]:
        """Where row state and the table columns of running rows are written."""

    def prefilling(self) -> AbstractContextManager[object]:
        """Where the table columns of PREFILL rows are written."""


class Computed(Generic[R]):
    """A result that was computed at its launch."""

    def __init__(self, value: R) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> R:
        return self._value


class TorchExecutor:
    """The plain-torch twins; every launch computes at once."""

    one_stream = True

    def __init__(
        self,
        model: OuroModel,
        rows: Rows,
        pool: KVPool,
        heads: dict[ExitMode, Head],
        min_coda_batch_size: int,
    ) -> None:
        self._model = model
        self._heads = heads
        self._rows = rows
        self._attention = TorchAttention(pool, model.config.head_dim)
        self._runner = RoundRunner(model, rows, self._attention, heads, min_coda_batch_size)

    def launch_round(self, running: int, wishes: dict[int, LogprobWish]) -> Computed[RoundBlock]:
        return Computed(self._runner.run(wishes))

    def update_weights(self, folder: Path) -> None:
        self._heads.update(replace_weights(self._model, folder))

    def decoding(self) -> AbstractContextManager[object]:
        return nullcontext()

    def prefilling(self) -> AbstractContextManager[object]:
        return nullcontext()

    def launch_chunk(
        self, chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None]
    ) -> Computed[ChunkResult]:
        return Computed(run_chunk(chunk, prompts, self._model, self._rows, self._attention))
