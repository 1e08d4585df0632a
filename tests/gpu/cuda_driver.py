"""A CUDA worker for :mod:`tests.worker_driver`: any model, any execution mode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ouro_sgl.messages import ExitMode
from ouro_sgl.models.config import OuroConfig
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import random_lookahead_head
from ouro_sgl.worker.cuda_executor import CudaExecutor
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.worker import Worker, WorkerSettings
from tests.worker_driver import Model


@dataclass(frozen=True)
class Mode:
    """How rounds and chunks are executed; none of it may change a bit."""

    graphs: bool = True
    single_stream: bool = True
    power_of_two: bool = False
    static_buffers: bool = True


class CudaModel(Model):
    """A model on the GPU; ``worker`` builds one in ``mode``, with poisoned slots."""

    mode = Mode()
    max_chunk = 512

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder, dtype, "cuda")

    @classmethod
    def of(cls, config: OuroConfig, model: OuroModel) -> CudaModel:
        """Around weights that exist already."""
        made = cls.__new__(cls)
        made.config, made.model, made.dtype, made.lookahead = config, model, model.dtype, None
        return made

    def worker(self, num_slots: int, settings: WorkerSettings) -> Worker:
        heads = {ExitMode.RANDOM_LOOKAHEAD: random_lookahead_head(0, self.config.hidden_size)}
        if self.lookahead is not None:
            heads[ExitMode.LOOKAHEAD] = self.lookahead
        device = self.model.device
        pool = KVPool(self.config, num_slots, self.dtype, device, poison=True)
        rows = Rows(
            settings.max_rows,
            settings.max_length,
            self.config.total_loops,
            self.config.vocab_size,
            self.config.hidden_size,
            self.dtype,
            device,
        )
        executor = CudaExecutor(
            self.model,
            rows,
            pool,
            heads,
            min_coda_batch_size=settings.min_coda_batch_size,
            max_chunk=self.max_chunk,
            blocks=settings.rounds_in_flight + 1,
            graphs=self.mode.graphs,
            static_buffers=self.mode.static_buffers,
            single_stream=self.mode.single_stream,
            power_of_two=self.mode.power_of_two,
        )
        return Worker(rows, pool, executor, settings)
