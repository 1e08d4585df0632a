"""The CUDA side of the worker: two streams, graphs for rounds, memory sizing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ouro_sgl.messages import Chunk, ExitMode
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.worker.cuda_prefill import CudaPrefill, PendingChunk
from ouro_sgl.worker.cuda_round import CudaRounds, PendingRound
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.prefill import Prompt
from ouro_sgl.worker.round import Head
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish
from ouro_sgl.worker.sm_partition import Partition, partition
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
    """Rounds on a decode stream, chunks on a prefill stream.

    While a chunk runs beside rounds, both are on streams of the ``decode_sms`` SMs that decode keeps and of
    the others; else on streams of the whole device, decode's with high priority. With ``single_stream``
    all share one. Work that changes streams waits for what was launched before it. Row state and the
    table columns of running rows are written where rounds run, those of PREFILL rows where chunks do;
    a prompt's last hidden state crosses over only after the host has seen its chunk's event.
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
        single_stream: bool = False,
        decode_sms: int = 0,
        power_of_two: bool = False,
        pdl: bool = True,
    ) -> None:
        self._model = model
        self._sms = torch.cuda.get_device_properties(model.device).multi_processor_count
        self._whole_decode = torch.cuda.Stream(model.device, priority=-1)
        self._whole_prefill = self._whole_decode if single_stream else torch.cuda.Stream(model.device)
        self.parts: Partition | None = None
        if decode_sms and not single_stream:
            self.parts = partition(model.device, decode_sms)
        self._decode, self._prefill = self._whole_decode, self._whole_prefill
        self._chunk: PendingChunk | None = None  # the newest
        torch.cuda.synchronize()
        with self.prefilling():
            self._chunks = CudaPrefill(model, rows, pool, max_chunk, self.parts)
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
            self._rounds.capture(self._sms)
        torch.cuda.synchronize()
        if self.parts is not None:
            with torch.cuda.stream(self.parts.decode):
                self._rounds.capture(self.parts.decode_sms)
            torch.cuda.synchronize()

    @property
    def prefill_row_counts(self) -> dict[str, tuple[int, ...]]:
        """Row counts that prefill products are padded to, by weight."""
        return self._chunks.row_counts

    @property
    def graphs(self) -> list[int]:
        """Row counts that have a captured graph."""
        return self._rounds.captured

    def update_weights(self, folder: Path) -> None:
        torch.cuda.synchronize()  # graphs and launched kernels read the weights where they are
        self._rounds.load_heads(replace_weights(self._model, folder))
        torch.cuda.synchronize()

    def decoding(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._decode)

    def prefilling(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._prefill)

    def launch_round(self, running: int, wishes: dict[int, LogprobWish]) -> PendingRound:
        stream, sms = self._whole_decode, self._sms
        if self.parts is not None and self._prefill is self.parts.prefill and self._prefill_runs():
            stream, sms = self.parts.decode, self.parts.decode_sms
        self._decode = _moved(self._decode, stream)
        with self.decoding():
            return self._rounds.launch(running, wishes, sms)

    def _prefill_runs(self) -> bool:
        """Whether a chunk is being launched or has not ended."""
        return self._chunk is None or not self._chunk.done()

    def launch_chunk(
        self, chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None], *, beside: bool
    ) -> PendingChunk:
        parts = self.parts if beside else None
        self._chunk = None
        self._prefill = _moved(self._prefill, parts.prefill if parts else self._whole_prefill)
        with self.prefilling():
            pending = self._chunks.launch(chunk, prompts, between_layers, parts.prefill_sms if parts else 0)
        self._chunk = pending
        for tensor in pending.tensors():  # read at activation
            tensor.record_stream(self._whole_decode)
            if self.parts is not None:
                tensor.record_stream(self.parts.decode)
        return pending


def _moved(old: torch.cuda.Stream, new: torch.cuda.Stream) -> torch.cuda.Stream:
    """``new``, after all that was launched on ``old``."""
    if new is not old:
        new.wait_stream(old)
    return new
