"""Decode attention at page size 1 over a device-built work list.

A lane's keys are split by the lane's OWN length only (``split_size``), each split is one work item
per head, and the partial results are merged in split order: neighbours cannot change a bit. The
list is built once per round on the device and read by all layers; programs are persistent, so one
captured launch serves any lengths. Slot offsets are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SHORT_LENGTH = 2048  # up to here splits of SHORT_SPLIT tokens, beyond of LONG_SPLIT
SHORT_SPLIT = 256
LONG_SPLIT = 512


def max_tiles_per_lane(max_length: int) -> int:
    """Work items per head that one lane can have."""
    short = triton.cdiv(min(max_length, SHORT_LENGTH), SHORT_SPLIT)
    return max(short, triton.cdiv(max_length, LONG_SPLIT))


@triton.jit
def split_size(length, SHORT_LENGTH: tl.constexpr, SHORT_SPLIT: tl.constexpr, LONG_SPLIT: tl.constexpr):
    return tl.where(length <= SHORT_LENGTH, SHORT_SPLIT, LONG_SPLIT)


@triton.jit
def _decode_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    table_index_ptr,
    length_ptr,
    tile_lane_ptr,
    tile_split_ptr,
    num_tiles_ptr,
    partial_ptr,
    log_sum_ptr,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT_LENGTH: tl.constexpr,
    SHORT_SPLIT: tl.constexpr,
    LONG_SPLIT: tl.constexpr,
):
    items = tl.load(num_tiles_ptr) * HEADS
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item // HEADS
        head = item % HEADS
        lane = tl.load(tile_lane_ptr + tile)
        length = tl.load(length_ptr + lane)
        size = split_size(length, SHORT_LENGTH, SHORT_SPLIT, LONG_SPLIT)
        low = tl.load(tile_split_ptr + tile) * size
        high = tl.minimum(low + size, length)
        table = table_ptr + tl.load(table_index_ptr + lane).to(tl.int64) * table_stride
        query = tl.load(query_ptr + (lane * HEADS + head) * D + d).to(tl.float32) * scale
        inner = (head // (HEADS // KV_HEADS)) * D + d[None, :]
        peak = -float("inf")
        total = 0.0
        acc = tl.zeros((D,), tl.float32)
        for start in tl.range(low, high, TILE, num_stages=STAGES):
            at = start + t
            visible = at < high
            slot = tl.load(table + at, mask=visible, other=0).to(tl.int64)
            offset = slot[:, None] * (KV_HEADS * D) + inner
            key = tl.load(keys_ptr + offset, mask=visible[:, None], other=0.0)
            value = tl.load(values_ptr + offset, mask=visible[:, None], other=0.0)
            score = tl.sum(key.to(tl.float32) * query[None, :], 1)
            score = tl.where(visible, score, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(score, 0))
            rescale = tl.exp2(peak - new_peak)
            weight = tl.exp2(score - new_peak)
            acc = acc * rescale + tl.sum(weight[:, None] * value.to(tl.float32), 0)
            total = total * rescale + tl.sum(weight, 0)
            peak = new_peak
        out = tile.to(tl.int64) * HEADS + head
        tl.store(partial_ptr + out * D + d, acc / total)
        tl.store(log_sum_ptr + out, peak + tl.log2(total))


@triton.jit
def _merge_kernel(
    partial_ptr,
    log_sum_ptr,
    length_ptr,
    tile_start_ptr,
    count_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SHORT_LENGTH: tl.constexpr,
    SHORT_SPLIT: tl.constexpr,
    LONG_SPLIT: tl.constexpr,
):
    lane = tl.program_id(0)
    if lane >= tl.load(count_ptr):
        return
    head = tl.program_id(1)
    d = tl.arange(0, D)
    length = tl.load(length_ptr + lane)
    splits = tl.cdiv(length, split_size(length, SHORT_LENGTH, SHORT_SPLIT, LONG_SPLIT))
    first = tl.load(tile_start_ptr + lane).to(tl.int64)
    peak = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for split in tl.range(0, splits):  # in index order
        at = (first + split) * HEADS + head
        log_sum = tl.load(log_sum_ptr + at)
        part = tl.load(partial_ptr + at * D + d)
        new_peak = tl.maximum(peak, log_sum)
        rescale = tl.exp2(peak - new_peak)
        weight = tl.exp2(log_sum - new_peak)
        acc = acc * rescale + part * weight
        total = total * rescale + weight
        peak = new_peak
    tl.store(out_ptr + (lane * HEADS + head) * D + d, (acc / total).to(out_ptr.dtype.element_ty))


class WorkList:
    """Buffers of one round's attention work, for up to ``max_lanes`` lanes. All int32.

    ``table_index`` [lanes]: row of the flat slot table [T * rows, max_length] of each lane;
    ``length`` [lanes]; ``tile_start`` [lanes]: first tile of the lane; ``tile_lane``, ``tile_split``
    [tiles]; ``num_tiles`` [1]; ``partial`` fp32 [tiles, heads, D], ``log_sum`` fp32 [tiles, heads].
    """

    def __init__(
        self, max_lanes: int, max_length: int, heads: int, head_dim: int, device: torch.device
    ) -> None:
        tiles = max_lanes * max_tiles_per_lane(max_length)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.table_index, self.length, self.tile_start = ints(max_lanes), ints(max_lanes), ints(max_lanes)
        self.tile_lane, self.tile_split, self.num_tiles = ints(tiles), ints(tiles), ints(1)
        self.partial = torch.empty(tiles, heads, head_dim, dtype=torch.float32, device=device)
        self.log_sum = torch.empty(tiles, heads, dtype=torch.float32, device=device)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    work: WorkList,
    count: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    programs: int,
    tile: int = 32,
    stages: int = 2,
    warps: int = 2,
) -> None:
    """One query per lane over its own slots, for the first ``count`` lanes.

    query, out [B, heads, D]; keys, values [num_slots, kv_heads, D] of one layer; table int32
    [T * rows, max_length].
    """
    lanes, heads, head_dim = query.shape
    sizes = {"SHORT_LENGTH": SHORT_LENGTH, "SHORT_SPLIT": SHORT_SPLIT, "LONG_SPLIT": LONG_SPLIT}
    _decode_kernel[(programs,)](
        query,
        keys,
        values,
        table,
        work.table_index,
        work.length,
        work.tile_lane,
        work.tile_split,
        work.num_tiles,
        work.partial,
        work.log_sum,
        table.shape[1],
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=head_dim,
        TILE=tile,
        STAGES=stages,
        num_warps=warps,
        **sizes,
    )
    _merge_kernel[(lanes, heads)](
        work.partial,
        work.log_sum,
        work.length,
        work.tile_start,
        count,
        out,
        HEADS=heads,
        D=head_dim,
        num_warps=1,
        **sizes,
    )


def decode_attention_twin(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    table_index: torch.Tensor,
    length: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[lanes, heads, D] fp32, one lane at a time."""
    group = query.shape[1] // keys.shape[1]
    rows = []
    for lane in range(query.shape[0]):
        slots = table[int(table_index[lane]), : int(length[lane])].long()
        key = keys[slots].float().repeat_interleave(group, 1)
        value = values[slots].float().repeat_interleave(group, 1)
        score = torch.einsum("hd,nhd->hn", query[lane].float(), key) * scale
        rows.append(torch.einsum("hn,nhd->hd", torch.softmax(score, -1), value))
    return torch.stack(rows)
