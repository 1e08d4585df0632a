"""The CUDA side of the worker: streams, and the row counts that rounds are captured for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ouro_sgl.messages import Chunk, ExitMode
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import Head
from ouro_sgl.worker.cuda_prefill import CudaPrefill, PendingChunk
from ouro_sgl.worker.cuda_round import CudaRounds, PendingRound
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.prefill import Prompt
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish
from ouro_sgl.worker.update import replace_weights

FINE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)


def row_buckets(max_rows: int, *, power_of_two: bool) -> list[int]:
    """Row counts that rounds are padded to, up to ``max_rows``."""
    if power_of_two:
        buckets = [1 << bit for bit in range(max_rows.bit_length())]
    else:
        buckets = [size for size in FINE_BUCKETS if size <= max_rows]
        buckets += range(FINE_BUCKETS[-1] + 64, max_rows + 1, 64)
    if buckets[-1] < max_rows:
        buckets.append(max_rows)
    return buckets


class CudaExecutor:
    """Rounds on the decode stream (high priority); chunks on it too, or beside it on one of their own.

    Row state and the table columns of running rows are written on the decode stream alone, those of PREFILL
    rows where chunks run; a prompt's last hidden state crosses over only after the host has seen its chunk's
    event.

    Args:
        max_chunk: positions of the longest chunk.
        single_stream: chunks run between rounds.
        power_of_two: see :func:`row_buckets`. Everything else: see :class:`CudaRounds`.
    """

    def __init__(
        self,
        model: OuroModel,
        rows: Rows,
        pool: KVPool,
        heads: dict[ExitMode, Head],
        *,
        min_coda_batch_size: int,
        max_chunk: int,
        blocks: int,
        graphs: bool = True,
        max_graph_rows: int | None = None,
        max_graphs: int | None = None,
        static_buffers: bool = True,
        single_stream: bool = True,
        power_of_two: bool = False,
        pdl: bool = True,
    ) -> None:
        self._model = model
        self.decode_stream = torch.cuda.Stream(model.device, priority=-1)
        self.one_stream = single_stream
        self.prefill_stream = self.decode_stream if single_stream else torch.cuda.Stream(model.device)
        torch.cuda.synchronize()
        with self.prefilling():
            self._prefill = CudaPrefill(model, rows, pool, max_chunk, graphs=graphs)
        torch.cuda.synchronize()
        with self.decoding():
            self._rounds = CudaRounds(
                model,
                rows,
                pool,
                heads,
                min_coda_batch_size,
                row_buckets(rows.max_rows, power_of_two=power_of_two),
                blocks,
                graphs=graphs,
                max_graph_rows=max_graph_rows,
                max_graphs=max_graphs,
                static_buffers=static_buffers,
                pdl=pdl,
            )
        torch.cuda.synchronize()

    @property
    def prefill_row_counts(self) -> dict[str, tuple[int, ...]]:
        """Row counts that prefill products are padded to, by weight."""
        return self._prefill.row_counts

    @property
    def prefill_graphs(self) -> list[int]:
        """Numbers of positions that have a captured graph of a chunk."""
        return self._prefill.captured

    @property
    def graphs(self) -> list[int]:
        """Row counts that have a captured graph of a round."""
        return self._rounds.captured

    def rehearse_chunk(self) -> None:
        """See :meth:`CudaPrefill.rehearse`."""
        with self.prefilling():
            self._prefill.rehearse()

    def update_weights(self, folder: Path) -> None:
        torch.cuda.synchronize()  # graphs and launched kernels read the weights where they are
        self._rounds.load_heads(replace_weights(self._model, folder))
        torch.cuda.synchronize()

    def decoding(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.decode_stream)

    def prefilling(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.prefill_stream)

    def launch_round(self, running: int, wishes: dict[int, LogprobWish]) -> PendingRound:
        with self.decoding():
            return self._rounds.launch(running, wishes)

    def launch_chunk(
        self, chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None]
    ) -> PendingChunk:
        with self.prefilling():
            pending = self._prefill.launch(chunk, prompts, between_layers)
        for tensor in pending.tensors():
            tensor.record_stream(self.decode_stream)  # read there at activation
        return pending
