"""Decode attention at page size 1 over a device-built work list.

Bits: a lane's keys are cut into tiles of ``TILE`` tokens at absolute positions and groups of
``GROUP`` tokens. Each tile has its own maximum, sum and weighted values; the tiles of a group are
merged in order, then the groups in order, always by ``_merge``. Who computes what may depend on the
batch: a work item is one tile (few lanes: more programs) or one group (many lanes: fewer partial
results), and both give the same chain of operations. The list is built once per round on the device
and read by all layers; programs are persistent, so one captured launch serves any lengths. Slot
offsets are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ouro_kernels.triton_ops.gemm import pdl_launch, prefetch

TILE = 32
GROUP = 512
FINE_TILES = 768  # up to so many tiles in a round, an item is a tile


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
    item_span_ptr,
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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    items = tl.load(num_items_ptr) * HEADS
    span = tl.load(item_span_ptr)
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    if PDL:
        # the work list is older than the kernel before this one, and so are most keys and values
        if span == TILE and tl.program_id(0) < items:
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
        high = tl.minimum(low + span, tl.load(length_ptr + lane))
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
def _merge_kernel(
    partial_ptr,
    peak_ptr,
    total_ptr,
    length_ptr,
    first_item_ptr,
    item_span_ptr,
    count_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.program_id(0)
    if lane < tl.load(count_ptr):
        head = tl.program_id(1)
        d = tl.arange(0, D)
        span = tl.load(item_span_ptr)
        items = tl.cdiv(tl.load(length_ptr + lane), span)
        per_group = GROUP // span
        first = tl.load(first_item_ptr + lane).to(tl.int64)
        peak = -float("inf")
        total = 0.0
        acc = tl.zeros((D,), tl.float32)
        group_peak = -float("inf")
        group_total = 0.0
        group_acc = tl.zeros((D,), tl.float32)
        for item in tl.range(0, items, num_stages=4):
            at = (first + item) * HEADS + head
            part = tl.load(partial_ptr + at * D + d)
            group_peak, group_total, group_acc = _merge(
                group_peak, group_total, group_acc, tl.load(peak_ptr + at), tl.load(total_ptr + at), part
            )
            if (item + 1) % per_group == 0 or item + 1 == items:
                peak, total, acc = _merge(peak, total, acc, group_peak, group_total, group_acc)
                group_peak = -float("inf")
                group_total = 0.0
                group_acc = tl.zeros((D,), tl.float32)
        tl.store(out_ptr + (lane * HEADS + head) * D + d, (acc / total).to(out_ptr.dtype.element_ty))


def max_items(max_lanes: int, max_length: int) -> int:
    """Work items per head that a round can have."""
    return max(FINE_TILES, max_lanes * triton.cdiv(max_length, GROUP))


class WorkList:
    """Buffers of one round's attention work, for up to ``max_lanes`` lanes. Integers are int32.

    ``table_index`` [lanes]: row of the flat slot table [T * rows, max_length] of each lane;
    ``length`` [lanes]; ``first_item`` [lanes]: where the lane's items begin; ``item_lane`` and
    ``item_start`` (a position) [items]; ``num_items`` [1]; ``item_span`` [1]: tokens per item, TILE
    or GROUP. Partial results: ``partial`` fp32 [items, heads, D], ``peak``, ``total`` [items, heads].
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
        self.num_items, self.item_span = ints(1), ints(1)
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
        work.item_span,
        work.num_items,
        work.partial,
        work.peak,
        work.total,
        table.shape[1],
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=head_dim,
        TILE=TILE,
        STAGES=stages,
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
        work.item_span,
        count,
        out,
        HEADS=heads,
        D=head_dim,
        GROUP=GROUP,
        PDL=pdl,
        num_warps=1,
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
