"""The attention backend: metadata once per round or chunk, then one call per layer.

A backend is four verbs. ``plan_*`` is called once and holds for all layers of the round (decode)
or of one loop of the chunk (prefill); ``decode`` and ``prefill`` store K and V first and then
attend, so lanes of one row see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from ouro_kernels.attention import TILE, decode_attention, prefill_attention

from ouro_sgl.worker.kv_pool import KVPool


class AttentionBackend(Protocol):
    def plan_decode(self, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """table [L, n] int64: slots of each lane's positions 0 .. n - 1 (n a multiple of ``TILE``),
        of which the first ``lengths`` [L] int64 count; the last of them is the lane's own."""

    def decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...

    def plan_prefill(self, segments: Sequence[tuple[torch.Tensor, int]]) -> None:
        """One (slots [end] int64, start) per segment, in the order of the packed rows."""

    def prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


class TorchAttention:
    """The kernels' plain-torch twins; exact, on any device."""

    def __init__(self, pool: KVPool, head_dim: int) -> None:
        self._pool = pool
        self._scale = head_dim**-0.5
        self._segments: Sequence[tuple[torch.Tensor, int]] = ()
        self._write_slots = self._lengths = self._table = torch.empty(0, dtype=torch.int64)

    def plan_decode(self, table: torch.Tensor, lengths: torch.Tensor) -> None:
        own = table.gather(1, (lengths - 1).unsqueeze(1))
        visible = torch.arange(table.shape[1], device=table.device) < lengths.unsqueeze(1)
        self._table = torch.where(visible, table, own)
        self._lengths = lengths
        self._write_slots = own.squeeze(1)

    def decode(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        pool = self._pool
        pool.write(layer, self._write_slots, key, value)
        return decode_attention(
            query, pool.keys[layer], pool.values[layer], self._table, self._lengths, self._scale
        )

    def plan_prefill(self, segments: Sequence[tuple[torch.Tensor, int]]) -> None:
        self._segments = segments
        self._write_slots = torch.cat([slots[start:] for slots, start in segments])

    def prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        pool = self._pool
        pool.write(layer, self._write_slots, key, value)
        sizes = [len(slots) - start for slots, start in self._segments]
        parts = zip(self._segments, query.split(sizes), strict=True)
        return torch.cat(
            [
                prefill_attention(part, pool.keys[layer], pool.values[layer], slots, start, self._scale)
                for (slots, start), part in parts
            ]
        )


def padded_length(length: int) -> int:
    """``length`` rounded up to whole attention tiles."""
    return -(-length // TILE) * TILE
