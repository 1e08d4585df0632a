"""Decode attention at page size 1 over a device-built work list.

Bits: a lane's keys are cut into tiles of ``TILE`` tokens at absolute positions and, by the lane's own
length, groups of ``group_size`` tokens. Each tile has its own maximum, sum and weighted values; the
tiles of a group are merged in order, then the groups in order, always by ``_merge``. Who computes
what may depend on the batch: a work item is one tile (few lanes: more programs) or one group (many
lanes: fewer partial results), and both give the same chain of operations. The list is built once per
round on the device and read by all layers; programs are persistent, so one captured launch serves
any lengths. Slot offsets are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ouro_kernels.triton_ops.gemm import pdl_launch, prefetch

TILE = 32
SHORT_LENGTH = 2048  # longer lanes have long groups: fewer partial results
SHORT_GROUP = 512
LONG_GROUP = 1024
FINE_TILES = 768  # up to so many tiles in a round, an item is a tile
UNROLL = 16  # partial results whose loads are in flight together


@triton.jit
def group_size(length, SHORT_LENGTH: tl.constexpr, SHORT_GROUP: tl.constexpr, LONG_GROUP: tl.constexpr):
    return tl.where(length <= SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)


@triton.jit
def item_span(
    fine,
    length,
    TILE: tl.constexpr,
    SHORT_LENGTH: tl.constexpr,
    SHORT_GROUP: tl.constexpr,
    LONG_GROUP: tl.constexpr,
):
    """Tokens of one work item of a lane."""
    return tl.where(fine != 0, TILE, group_size(length, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP))


@triton.jit
def _merge(peak, total, acc, new_peak, new_total, new_acc):
    """Add one partial result to the running one. Explicit fma: the compiler must not choose."""
    top = tl.maximum(peak, new_peak)
    old = tl.exp2(peak - top)
    new = tl.exp2(new_peak - top)
    return top, tl.fma(new_total, new, total * old), tl.fma(new_acc, new, acc * old)


@triton.jit
def _decode_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    table_index_ptr,
    length_ptr,
    item_lane_ptr,
    item_start_ptr,
    fine_ptr,
    num_items_ptr,
    partial_ptr,
    peak_ptr,
    total_ptr,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    SHORT_LENGTH: tl.constexpr,
    SHORT_GROUP: tl.constexpr,
    LONG_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    items = tl.load(num_items_ptr) * HEADS
    fine = tl.load(fine_ptr)
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    if PDL:
        # the work list is older than the kernel before this one, and so are most keys and values
        if fine != 0 and tl.program_id(0) < items:
            item = tl.program_id(0) // HEADS
            lane = tl.load(item_lane_ptr + item)
            at = tl.load(item_start_ptr + item) + t
            table = table_ptr + tl.load(table_index_ptr + lane).to(tl.int64) * table_stride
            slot = tl.load(table + at, mask=at < tl.load(length_ptr + lane), other=0).to(tl.int64)
            line = ((tl.program_id(0) % HEADS) // (HEADS // KV_HEADS)) * D + slot * (KV_HEADS * D)
            for part in tl.static_range(0, D, 64):
                prefetch(keys_ptr + line + part)
                prefetch(values_ptr + line + part)
        gdc_wait()
    for work in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        item = work // HEADS
        head = work % HEADS
        lane = tl.load(item_lane_ptr + item)
        low = tl.load(item_start_ptr + item)
        length = tl.load(length_ptr + lane)
        span = item_span(fine, length, TILE, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)
        high = tl.minimum(low + span, length)
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
            tile_peak = tl.max(score, 0)
            weight = tl.exp2(score - tile_peak)
            tile_acc = tl.sum(weight[:, None] * value.to(tl.float32), 0)
            peak, total, acc = _merge(peak, total, acc, tile_peak, tl.sum(weight, 0), tile_acc)
        out = item.to(tl.int64) * HEADS + head
        tl.store(partial_ptr + out * D + d, acc)
        tl.store(peak_ptr + out, peak)
        tl.store(total_ptr + out, total)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _merge_run(
    partial_ptr,
    peak_ptr,
    total_ptr,
    first,
    last,
    items,
    begin,
    end,
    head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge items ``begin .. end - 1`` of a lane's ``items`` in order. Its first stands at place
    ``first`` of the list, its last at ``last``. A place past the end adds exact zeros."""
    d = tl.arange(0, D)
    peak = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for start in tl.range(begin, end, UNROLL):
        for offset in tl.static_range(UNROLL):
            item = start + offset
            exists = item < end
            at = tl.where(item == items - 1, last, first + item) * HEADS + head
            item_peak = tl.load(peak_ptr + at, mask=exists, other=-float("inf"))
            item_total = tl.load(total_ptr + at, mask=exists, other=0.0)
            part = tl.load(partial_ptr + at * D + d, mask=exists, other=0.0)
            peak, total, acc = _merge(peak, total, acc, item_peak, item_total, part)
    return peak, total, acc


@triton.jit
def _merge_kernel(
    partial_ptr,
    peak_ptr,
    total_ptr,
    length_ptr,
    first_item_ptr,
    num_full_ptr,
    fine_ptr,
    count_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    SHORT_LENGTH: tl.constexpr,
    SHORT_GROUP: tl.constexpr,
    LONG_GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.program_id(0)
    if lane < tl.load(count_ptr):
        head = tl.program_id(1)
        d = tl.arange(0, D)
        length = tl.load(length_ptr + lane)
        group = group_size(length, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)
        first = tl.load(first_item_ptr + lane).to(tl.int64)
        last = tl.load(num_full_ptr).to(tl.int64) + lane
        peak = -float("inf")
        total = 0.0
        acc = tl.zeros((D,), tl.float32)
        if tl.load(fine_ptr) != 0:
            tiles = tl.cdiv(length, TILE)
            for begin in tl.range(0, tiles, group // TILE):
                end = tl.minimum(begin + group // TILE, tiles)
                group_peak, group_total, group_acc = _merge_run(
                    partial_ptr,
                    peak_ptr,
                    total_ptr,
                    first,
                    last,
                    tiles,
                    begin,
                    end,
                    head,
                    HEADS,
                    D,
                    UNROLL,
                )
                peak, total, acc = _merge(peak, total, acc, group_peak, group_total, group_acc)
        else:
            groups = tl.cdiv(length, group)
            peak, total, acc = _merge_run(
                partial_ptr,
                peak_ptr,
                total_ptr,
                first,
                last,
                groups,
                0,
                groups,
                head,
                HEADS,
                D,
                UNROLL,
            )
        tl.store(out_ptr + (lane * HEADS + head) * D + d, (acc / total).to(out_ptr.dtype.element_ty))


SIZES = {
    "TILE": TILE,
    "SHORT_LENGTH": SHORT_LENGTH,
    "SHORT_GROUP": SHORT_GROUP,
    "LONG_GROUP": LONG_GROUP,
}


def max_items(max_lanes: int, max_length: int) -> int:
    """Work items per head that a round can have."""
    longest = max(-(-min(max_length, SHORT_LENGTH) // SHORT_GROUP), -(-max_length // LONG_GROUP))
    return max(FINE_TILES, max_lanes * longest)


class WorkList:
    """Buffers of one round's attention work, for up to ``max_lanes`` lanes. Integers are int32.

    ``table_index`` [lanes]: row of the flat slot table [T * rows, max_length] of each lane;
    ``length`` [lanes]; ``item_lane`` and ``item_start`` (a position) [items]. All but the last item of
    every lane come first in the list, those of a lane from place ``first_item`` [lanes] on; there are
    ``num_full`` [1] of them, all of one length, so the programs share them evenly. Behind them stands
    each lane's last item, shorter or not. ``num_items`` [1]; ``fine`` [1]: 1 if an item is a tile, 0 if
    it is a group. Partial results: ``partial`` fp32 [items, heads, D], ``peak``, ``total`` [items, heads].
    """

    def __init__(
        self, max_lanes: int, max_length: int, heads: int, head_dim: int, device: torch.device
    ) -> None:
        items = max_items(max_lanes, max_length)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.float32, device=device)

        self.table_index, self.length, self.first_item = ints(max_lanes), ints(max_lanes), ints(max_lanes)
        self.item_lane, self.item_start = ints(items), ints(items)
        self.num_items, self.num_full, self.fine = ints(1), ints(1), ints(1)
        self.partial = numbers(items, heads, head_dim)
        self.peak, self.total = numbers(items, heads), numbers(items, heads)


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
    stages: int = 2,
    warps: int = 2,
    pdl: bool = False,
) -> None:
    """One query per lane over its own slots, for the first ``count`` lanes.

    query, out [B, heads, D]; keys, values [num_slots, kv_heads, D] of one layer; table int32
    [T * rows, max_length].
    """
    lanes, heads, head_dim = query.shape
    extra = pdl_launch(pdl)
    _decode_kernel[(programs,)](
        query,
        keys,
        values,
        table,
        work.table_index,
        work.length,
        work.item_lane,
        work.item_start,
        work.fine,
        work.num_items,
        work.partial,
        work.peak,
        work.total,
        table.shape[1],
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=head_dim,
        STAGES=stages,
        **SIZES,
        PDL=pdl,
        num_warps=warps,
        **extra,
    )
    _merge_kernel[(lanes, heads)](
        work.partial,
        work.peak,
        work.total,
        work.length,
        work.first_item,
        work.num_full,
        work.fine,
        count,
        out,
        HEADS=heads,
        D=head_dim,
        UNROLL=UNROLL,
        PDL=pdl,
        num_warps=1,
        **SIZES,
        **extra,
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
