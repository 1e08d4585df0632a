"""Prefill attention: packed segments of several rows, causal, over their earlier keys and values.

Hopper reads tiles of consecutive rows several times faster than gathered ones, and a chunk reads each
key many times: so a row's earlier K and V are first copied from their slots side by side (``gather``),
and those of the chunk itself are written there too (``rope_write``).

Bits: query blocks and key tiles lie at absolute positions of their row, so a position is computed in
the same place of the same tiles whichever chunk brings it; a key that is masked for a query leaves its
running state bit for bit unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GATHER_TOKENS = 32
GATHER_COLUMNS = 512
GATHER_PROGRAMS = 128  # for each block of columns


@dataclass
class PrefillGroup:
    """Consecutive segments of a chunk whose rows fit the side-by-side buffer together.

    ``first``, ``end``: their packed positions. ``places``: place in the buffer of each of them.
    ``blocks``: query blocks as (first position, a multiple of ``block_q``; first and end of the real
    ones among its positions; packed index that its first position would have, from ``first`` on; place
    of the row's position 0), most keys first. ``copies``: (row, first position, end, place of the row's
    position 0) of up to GATHER_TOKENS positions to copy from their slots; row -1: to fill with zeros.
    """

    first: int
    end: int
    places: list[int] = field(default_factory=list)
    blocks: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)


def plan_groups(
    segments: list[tuple[int, int, int]], block_q: int, block_k: int, capacity: int
) -> list[PrefillGroup]:
    """Cut a chunk into groups. segments: (row, start, end) in the order of the packed positions.

    ``capacity``: places of the buffer; every ``end``, rounded up to ``block_k``, must fit.
    """
    groups: list[PrefillGroup] = []
    packed = place = 0
    for row, start, end in segments:
        padded = -(-end // block_k) * block_k
        if not groups or place + padded > capacity:
            groups.append(PrefillGroup(packed, packed))
            place = 0
        group = groups[-1]
        group.places.extend(range(place + start, place + end))
        for block in range(start - start % block_q, end, block_q):
            real = max(block, start), min(block + block_q, end)
            group.blocks.append((block, *real, packed + block - start - group.first, place))
        for source, low, high in ((row, 0, start), (-1, end, padded)):
            group.copies += [
                (source, at, min(at + GATHER_TOKENS, high), place) for at in range(low, high, GATHER_TOKENS)
            ]
        place += padded
        packed += end - start
        group.end = packed
    for group in groups:
        group.blocks.sort(key=lambda block: -block[2])
    return groups


def most_blocks(tokens: int, segments: int, block_q: int) -> int:
    """Query blocks that a group of so many tokens in so many segments can have."""
    return tokens // block_q + 2 * segments


def most_copies(capacity: int, segments: int) -> int:
    """Copies that a group of so many segments can have."""
    return capacity // GATHER_TOKENS + 2 * segments


@triton.jit
def _rope_write_kernel(
    qkv_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    positions_ptr,
    places_ptr,
    packed_keys_ptr,
    packed_values_ptr,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = D // 2
    kind = query_ptr.dtype.element_ty
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    keep = head < ALL
    i = tl.arange(0, HALF)[None, :]
    base = qkv_ptr + (row * ALL + head) * D + i
    first = tl.load(base, mask=keep, other=0.0)
    second = tl.load(base + HALF, mask=keep, other=0.0)
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + i).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + i).to(tl.float32)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    # products rounded apart, as the plain model does
    low = ((a * cos).to(kind).to(tl.float32) - (b * sin).to(kind).to(tl.float32)).to(kind)
    high = ((b * cos).to(kind).to(tl.float32) + (a * sin).to(kind).to(tl.float32)).to(kind)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & keep  # stored as it is
    query = query_ptr + (row * HEADS + head) * D + i
    tl.store(query, low, mask=is_query)
    tl.store(query + HALF, high, mask=is_query)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    is_key &= place >= 0
    is_value &= place >= 0
    key = (slot * KV_HEADS + head - HEADS) * D + i
    tl.store(keys_ptr + key, low, mask=is_key)
    tl.store(keys_ptr + key + HALF, high, mask=is_key)
    key = (place * KV_HEADS + head - HEADS) * D + i
    tl.store(packed_keys_ptr + key, low, mask=is_key)
    tl.store(packed_keys_ptr + key + HALF, high, mask=is_key)
    value = (slot * KV_HEADS + head - HEADS - KV_HEADS) * D + i
    tl.store(values_ptr + value, first, mask=is_value)
    tl.store(values_ptr + value + HALF, second, mask=is_value)
    value = (place * KV_HEADS + head - HEADS - KV_HEADS) * D + i
    tl.store(packed_values_ptr + value, first, mask=is_value)
    tl.store(packed_values_ptr + value + HALF, second, mask=is_value)


def rope_write(
    qkv: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Rotate query and key; key and value go to their slots and to their places side by side.

    qkv [M, (heads + 2 kv_heads) * D]; query [M, heads, D]; keys, values [num_slots, kv_heads, D] of one
    layer; packed_keys, packed_values [capacity, kv_heads * D]; slots, positions, places [M] integers, a
    place of -1: no position, its key and value go nowhere; cos, sin [positions, D / 2].
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    block = min(16, triton.next_power_of_2(heads + 2 * kv_heads))
    _rope_write_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, block))](
        qkv,
        query,
        keys,
        values,
        slots,
        positions,
        places,
        packed_keys,
        packed_values,
        cos,
        sin,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK=block,
        num_warps=4,
    )


def rope_twin(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query, key, value) [M, heads, D] of qkv [M, (heads + 2 kv_heads) * D]."""
    from ouro_kernels.rope import rope

    whole = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    query, key, value = whole.split((heads, kv_heads, kv_heads), dim=1)
    angles = cos[positions], sin[positions]
    return rope(query, *angles), rope(key, *angles), value


@triton.jit(do_not_specialize=["depth_offset"])
def _gather_kernel(
    keys_ptr,
    values_ptr,
    table_ptr,
    copies_ptr,
    num_copies_ptr,
    packed_keys_ptr,
    packed_values_ptr,
    depth_offset,
    table_stride,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for number in tl.range(tl.program_id(0), tl.load(num_copies_ptr), tl.num_programs(0)):
        copy = copies_ptr + number * 4
        row = tl.load(copy)
        at = tl.load(copy + 1) + tl.arange(0, TOKENS)
        inside = at < tl.load(copy + 2)
        place = tl.load(copy + 3)
        keep = inside[:, None] & (column < WIDTH)[None, :]
        found = keep & (row >= 0)
        table = table_ptr + (depth_offset + tl.maximum(row, 0)).to(tl.int64) * table_stride
        slot = tl.load(table + at, mask=inside & (row >= 0), other=0).to(tl.int64)
        source = slot[:, None] * WIDTH + column[None, :]
        target = (place + at).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(packed_keys_ptr + target, tl.load(keys_ptr + source, mask=found, other=0.0), mask=keep)
        tl.store(packed_values_ptr + target, tl.load(values_ptr + source, mask=found, other=0.0), mask=keep)


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    copies: torch.Tensor,
    num_copies: torch.Tensor,
    depth_offset: int,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
) -> None:
    """Copy K and V of earlier positions from their slots side by side; zeros behind a row's last.

    keys, values [num_slots, kv_heads, D] of one layer; table int32 [T * rows, max_length]; copies int32
    [n, 4] (:class:`PrefillGroup`), of which the first ``num_copies`` [1] count; depth_offset: depth *
    rows; packed_* [capacity, kv_heads * D].
    """
    if not len(copies):
        return
    width = packed_keys.shape[1]
    columns = min(GATHER_COLUMNS, triton.next_power_of_2(width))
    _gather_kernel[(min(len(copies), GATHER_PROGRAMS), triton.cdiv(width, columns))](
        keys,
        values,
        table,
        copies,
        num_copies,
        packed_keys,
        packed_values,
        depth_offset,
        table.shape[1],
        WIDTH=width,
        TOKENS=GATHER_TOKENS,
        COLUMNS=columns,
        num_warps=8,
    )


@triton.jit
def _attend(
    query,
    keys_desc,
    values_desc,
    place,
    column,
    position,
    peak,
    total,
    acc,
    tile,
    scale,
    BK: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One key tile. MASKED: it may hold keys that some query must not see."""
    key = keys_desc.load([place + tile, column])
    score = tl.dot(query, key.T, input_precision=PRECISION) * scale
    if MASKED:
        key_position = tile + tl.arange(0, BK)
        score = tl.where(key_position[None, :] <= position[:, None], score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    rescale = tl.exp2(peak - new_peak)
    weight = tl.exp2(score - new_peak[:, None])
    total = total * rescale + tl.sum(weight, 1)
    value = values_desc.load([place + tile, column])
    acc = tl.dot(weight.to(query.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def _prefill_kernel(
    query_ptr,
    keys_desc,
    values_desc,
    blocks_ptr,
    num_blocks_ptr,
    out_ptr,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if tl.program_id(1) >= tl.load(num_blocks_ptr):
        return
    block = blocks_ptr + tl.program_id(1) * 5
    head = tl.program_id(0)
    start = tl.load(block)  # absolute, a multiple of BQ
    first = tl.load(block + 1)
    last = tl.load(block + 2)  # positions first .. last - 1 of the block are real
    position = start + tl.arange(0, BQ)
    real = (position >= first) & (position < last)
    packed = tl.load(block + 3) + tl.arange(0, BQ)
    place = tl.load(block + 4)
    d = tl.arange(0, D)
    kind = query_ptr.dtype.element_ty
    at = (packed[:, None].to(tl.int64) * HEADS + head) * D + d[None, :]
    query = tl.load(query_ptr + at, mask=real[:, None], other=0.0)
    column = (head // (HEADS // KV_HEADS)) * D
    peak = tl.full((BQ,), -float("inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, D), tl.float32)
    # BQ is a multiple of BK: tiles below the block's first position are visible to all its queries
    for tile in tl.range(0, start, BK, num_stages=STAGES):
        peak, total, acc = _attend(
            query, keys_desc, values_desc, place, column, position, peak, total, acc, tile, scale, BK, False,
            PRECISION,
        )  # fmt: skip
    for tile in tl.range(start, last, BK, num_stages=STAGES):
        peak, total, acc = _attend(
            query, keys_desc, values_desc, place, column, position, peak, total, acc, tile, scale, BK, True,
            PRECISION,
        )  # fmt: skip
    tl.store(out_ptr + at, (acc / total[:, None]).to(kind), mask=real[:, None])


def prefill_attention(
    query: torch.Tensor,
    packed_keys: TensorDescriptor,
    packed_values: TensorDescriptor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    kv_heads: int,
    block_q: int,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Causal attention of packed positions.

    query, out [M, heads, D]; packed_* describe [capacity, kv_heads * D] in blocks of [block_k, D]; blocks
    int32 [n, 5] (:class:`PrefillGroup`), of which the first ``num_blocks`` [1] count.
    """
    _, heads, head_dim = query.shape
    _prefill_kernel[(heads, len(blocks))](
        query,
        packed_keys,
        packed_values,
        blocks,
        num_blocks,
        out,
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        BQ=block_q,
        BK=packed_keys.block_shape[0],
        STAGES=stages,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=warps,
    )


class PackedKV:
    """K and V of a group side by side, ``capacity`` positions, read in tiles of ``block_k``.

    ``describe``: makes the descriptor that the attention kernel takes of a tensor and its block.
    """

    def __init__(
        self,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        block_k: int,
        dtype: torch.dtype,
        device: torch.device,
        describe: Callable[[torch.Tensor, list[int]], Any] = TensorDescriptor.from_tensor,
    ) -> None:
        self.capacity = capacity
        self.keys = torch.zeros(capacity, kv_heads * head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.key_tiles = describe(self.keys, [block_k, head_dim])
        self.value_tiles = describe(self.values, [block_k, head_dim])
