"""Prefill attention: packed segments of several rows over their cached slots, causal.

Query blocks and key tiles lie at absolute positions of their row, so a position is computed in the
same place of the same tiles whichever chunk brings it; a key tile that is masked for a query leaves
its running state bit for bit unchanged. Keys and values are read through the slot table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _attend(
    query,
    keys_ptr,
    values_ptr,
    table,
    inner,
    position,
    peak,
    total,
    acc,
    tile,
    last,
    scale,
    STRIDE: tl.constexpr,
    BK: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One key tile. MASKED: it may hold keys that some query must not see."""
    key_position = tile + tl.arange(0, BK)
    if MASKED:
        exists = key_position < last
        slot = tl.load(table + key_position, mask=exists, other=0).to(tl.int64)
        offset = slot[:, None] * STRIDE + inner
        key = tl.load(keys_ptr + offset, mask=exists[:, None], other=0.0)
        value = tl.load(values_ptr + offset, mask=exists[:, None], other=0.0)
    else:
        slot = tl.load(table + key_position).to(tl.int64)
        offset = slot[:, None] * STRIDE + inner
        key = tl.load(keys_ptr + offset)
        value = tl.load(values_ptr + offset)
    score = tl.dot(query, key.T, input_precision=PRECISION) * scale
    if MASKED:
        score = tl.where(key_position[None, :] <= position[:, None], score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    rescale = tl.exp2(peak - new_peak)
    weight = tl.exp2(score - new_peak[:, None])
    total = total * rescale + tl.sum(weight, 1)
    acc = tl.dot(weight.to(query.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def _prefill_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    block_start_ptr,
    block_first_ptr,
    block_last_ptr,
    block_offset_ptr,
    block_row_ptr,
    out_ptr,
    depth_offset,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(1)
    head = tl.program_id(0)
    start = tl.load(block_start_ptr + block)  # absolute, a multiple of BQ
    first = tl.load(block_first_ptr + block)
    last = tl.load(block_last_ptr + block)  # positions first .. last - 1 of the block are real
    position = start + tl.arange(0, BQ)
    real = (position >= first) & (position < last)
    packed = tl.load(block_offset_ptr + block) + tl.arange(0, BQ)
    d = tl.arange(0, D)
    kind = query_ptr.dtype.element_ty
    at = (packed[:, None].to(tl.int64) * HEADS + head) * D + d[None, :]
    query = tl.load(query_ptr + at, mask=real[:, None], other=0.0)
    table = table_ptr + (depth_offset + tl.load(block_row_ptr + block)).to(tl.int64) * table_stride
    inner = (head // (HEADS // KV_HEADS)) * D + d[None, :]
    peak = tl.full((BQ,), -float("inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, D), tl.float32)
    # BQ is a multiple of BK: tiles below the block's first position are visible to all its queries
    for tile in tl.range(0, start, BK, num_stages=STAGES):
        peak, total, acc = _attend(
            query, keys_ptr, values_ptr, table, inner, position, peak, total, acc, tile, last, scale,
            KV_HEADS * D, BK, False, PRECISION,
        )  # fmt: skip
    for tile in tl.range(start, last, BK, num_stages=STAGES):
        peak, total, acc = _attend(
            query, keys_ptr, values_ptr, table, inner, position, peak, total, acc, tile, last, scale,
            KV_HEADS * D, BK, True, PRECISION,
        )  # fmt: skip
    tl.store(out_ptr + at, (acc / total[:, None]).to(kind), mask=real[:, None])


class PrefillBlocks:
    """Query blocks of one chunk, as five host lists of one length: the block's first position (a multiple
    of ``block_q``), its first and its end among the real ones, the packed row that would hold its first
    position, its row."""

    def __init__(self, segments: list[tuple[int, int, int]], block_q: int) -> None:
        """segments: (row, start, end) in the order of the packed rows."""
        columns: list[list[int]] = [[], [], [], [], []]
        packed = 0
        for row, start, end in segments:
            for block in range(start - start % block_q, end, block_q):
                first, last = max(block, start), min(block + block_q, end)
                # offset of the packed row that would hold the block's first position
                for column, value in zip(
                    columns, (block, first, last, packed + block - start, row), strict=True
                ):
                    column.append(value)
            packed += end - start
        self.columns = columns


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    blocks: torch.Tensor,
    depth_offset: int,
    out: torch.Tensor,
    scale: float,
    block_q: int,
    block_k: int,
    warps: int = 8,
    stages: int = 2,
) -> None:
    """Causal attention of packed positions.

    query, out [M, heads, D]; keys, values [num_slots, kv_heads, D] of one layer; table int32
    [T * rows, max_length]; blocks int32 [5, n] (:class:`PrefillBlocks`); depth_offset: depth * rows.
    """
    _, heads, head_dim = query.shape
    _prefill_kernel[(heads, blocks.shape[1])](
        query,
        keys,
        values,
        table,
        blocks[0],
        blocks[1],
        blocks[2],
        blocks[3],
        blocks[4],
        out,
        depth_offset,
        table.shape[1],
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=head_dim,
        BQ=block_q,
        BK=block_k,
        STAGES=stages,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=warps,
    )
