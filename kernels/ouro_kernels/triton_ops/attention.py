"""Decode attention at page size 1 over a device-built work list, rope and K/V write included.

Bits: a lane's keys are cut into parts of ``PART`` tokens at absolute positions and, by the lane's own
length, groups of parts (``num_groups``). A part is one chain over its tiles of ``TILE`` tokens; the
parts of a group are merged in order, then the groups in order, always by ``_merge``.

Who computes what depends on the batch: the parts of all lanes, end to end, are cut into ranges, one for
each head and program. They differ by one part at most, so that the programs end together at any lengths;
where that is nearly so with a range for each group, nothing is cut within one (``whole_groups``).
A group that is cut is one partial result up to its first cut, and one for each part behind it;
whichever program of a group, and then of a lane and head, finishes last merges what was written: the
same chain of operations wherever the cuts are. Programs begin with the group that is cut at their end,
so that it is merged while they still read others. The list is built once per round on the device and
read by all layers, so one captured launch serves any lengths. Slot offsets are int64.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ouro_kernels.triton_ops.gemm import pdl_launch

TILE = 32
PART = 64
SHORT_LENGTH = 2048  # longer lanes have long groups: fewer partial results
SHORT_GROUP = 512
LONG_GROUP = 1024
UNROLL = 16  # partial results whose loads are in flight together
MAX_REGISTERS = 128  # of a thread: eight programs per SM
# Parts of the longest group, one and a half times its size. At most one group that is cut begins in a
# range, and has that many places there.
PLACES = 3 * LONG_GROUP // 2 // PART


@triton.jit
def group_size(length, SHORT_LENGTH: tl.constexpr, SHORT_GROUP: tl.constexpr, LONG_GROUP: tl.constexpr):
    """Tokens of every group of a lane but the last, which has half as many to half as many again."""
    return tl.where(length <= SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)


@triton.jit
def num_groups(length, group):
    return tl.maximum((length + group // 2) // group, 1)


@triton.jit
def whole_groups(groups, longest, num_parts, ranges):
    """Whether every group gets a range of its own; longest: parts of the longest one. A quarter of a part
    more than one above the fair share costs less than merging groups that are cut."""
    return (groups <= ranges) & ((longest - 1) * ranges <= num_parts + ranges // 4)


@triton.jit
def _merge(peak, total, acc, new_peak, new_total, new_acc):
    """Add one partial result to the running one. Explicit fma: the compiler must not choose."""
    top = tl.maximum(peak, new_peak)
    old = tl.exp2(peak - top)
    new = tl.exp2(new_peak - top)
    return top, tl.fma(new_total, new, total * old), tl.fma(new_acc, new, acc * old)


@triton.jit
def _rotated(x_ptr, cos_ptr, sin_ptr, D: tl.constexpr, kind: tl.constexpr):
    """Rotary embedding of one head [D], products rounded apart as in the plain model."""
    d = tl.arange(0, D)
    HALF: tl.constexpr = D // 2
    x = tl.load(x_ptr + d).to(tl.float32)
    partner = tl.load(x_ptr + (d ^ HALF)).to(tl.float32)
    cos = tl.load(cos_ptr + d % HALF).to(tl.float32)
    sin = tl.load(sin_ptr + d % HALF).to(tl.float32)
    same = (x * cos).to(kind).to(tl.float32)
    crossed = (partner * sin).to(kind).to(tl.float32)
    return tl.where(d < HALF, same - crossed, same + crossed).to(kind)


@triton.jit
def _merge_run(
    partial_ptr,
    peak_ptr,
    total_ptr,
    begin,
    end,
    head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge the partial results at places ``begin .. end - 1`` in order, from L2: other programs wrote
    them. A place past the end adds exact zeros."""
    d = tl.arange(0, D)
    peak = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for start in tl.range(begin, end, UNROLL):
        for offset in tl.static_range(UNROLL):
            at = (start + offset) * HEADS + head
            exists = start + offset < end
            part_peak = tl.load(peak_ptr + at, mask=exists, other=-float("inf"), cache_modifier=".cg")
            part_total = tl.load(total_ptr + at, mask=exists, other=0.0, cache_modifier=".cg")
            part = tl.load(partial_ptr + at * D + d, mask=exists, other=0.0, cache_modifier=".cg")
            peak, total, acc = _merge(peak, total, acc, part_peak, part_total, part)
    return peak, total, acc


@triton.jit
def _touch(loaded):
    """Keep a load that nothing else needs: what it brought is in the cache for those that follow."""
    tl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [loaded.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _decode_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    table_index_ptr,
    length_ptr,
    first_part_ptr,
    first_group_ptr,
    range_begin_ptr,
    range_lane_ptr,
    num_parts_ptr,
    partial_ptr,
    peak_ptr,
    total_ptr,
    group_arrived_ptr,
    lane_arrived_ptr,
    out_ptr,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    SHORT_LENGTH: tl.constexpr,
    SHORT_GROUP: tl.constexpr,
    LONG_GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    PLACES: tl.constexpr,
    RANGES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP_PLACES: tl.constexpr = RANGES * PLACES
    head = tl.program_id(0) % HEADS
    number = tl.program_id(0) // HEADS
    num_parts = tl.load(num_parts_ptr)
    begin = tl.load(range_begin_ptr + number)
    stop = tl.load(range_begin_ptr + number + 1)
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    kind = out_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    SHARE: tl.constexpr = HEADS // KV_HEADS
    kv_head = head // SHARE
    inner = kv_head * D + d[None, :]
    # the work list and the table are older than the kernel before
    first_lane = tl.load(range_lane_ptr + number, mask=begin < stop, other=0)
    part, limit, lane = begin, stop, first_lane
    if (begin < stop) & (stop < num_parts):
        next_lane = tl.load(range_lane_ptr + number + 1)
        length = tl.load(length_ptr + next_lane)
        first_part = tl.load(first_part_ptr + next_lane)
        group = group_size(length, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)
        inside = (stop - first_part) * PART
        cut = tl.minimum(inside // group, num_groups(length, group) - 1) * group
        if cut < inside:
            part = tl.maximum(first_part + cut // PART, begin)
            lane = tl.where(first_part > begin, next_lane, first_lane)
    cut_begin = tl.where(part > begin, part, stop)
    if PDL:
        if begin < stop:
            places = table_ptr + tl.load(table_index_ptr + lane).to(tl.int64) * table_stride
            at = (part - tl.load(first_part_ptr + lane)) * PART + tl.arange(0, PART)
            _touch(tl.load(places + at, mask=at < tl.load(length_ptr + lane), other=0))
            _touch(tl.load(first_group_ptr + lane))
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    while part < limit:
        length = tl.load(length_ptr + lane)
        first_part = tl.load(first_part_ptr + lane)
        first_group = tl.load(first_group_ptr + lane).to(tl.int64)
        low = (part - first_part) * PART
        high = tl.minimum((limit - first_part) * PART, length)
        group = group_size(length, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)
        groups = num_groups(length, group)
        first = tl.minimum(low // group, groups - 1)
        first_low = first * group
        first_high = tl.where(first == groups - 1, length, first_low + group)
        cut_group = (low > first_low) | (high < first_high)
        if cut_group:
            high = tl.minimum(high, first_high)
        # where the group's partial results are, if it is cut: with the range that it begins in
        group_part = first_part + first_low // PART
        owner = ((group_part + 1) * RANGES - 1) // num_parts
        group_place = owner.to(tl.int64) * PLACES - group_part
        table = table_ptr + tl.load(table_index_ptr + lane).to(tl.int64) * table_stride
        own = qkv_ptr + lane.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
        cos = cos_ptr + (length - 1).to(tl.int64) * HALF
        sin = sin_ptr + (length - 1).to(tl.int64) * HALF
        query = _rotated(own + head * D, cos, sin, D, kind).to(tl.float32) * scale
        if high == length:
            # heads that share a key head write the same bytes; each reads its own write
            slot = tl.load(table + length - 1).to(tl.int64) * (KV_HEADS * D) + kv_head * D
            tl.store(keys_ptr + slot + d, _rotated(own + (HEADS + kv_head) * D, cos, sin, D, kind))
            tl.store(values_ptr + slot + d, tl.load(own + (HEADS + KV_HEADS + kv_head) * D + d))
            tl.debug_barrier()
        group_peak = -float("inf")
        group_total = 0.0
        group_acc = tl.zeros((D,), tl.float32)
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
            top = tl.maximum(peak, tl.max(score, 0))
            weight = tl.exp2(score - top)
            rescale = tl.exp2(peak - top)
            total = tl.fma(total, rescale, tl.sum(weight, 0))
            acc = tl.fma(acc, rescale, tl.sum(weight[:, None] * value.to(tl.float32), 0))
            peak = top
            if ((start + TILE) % PART == 0) | (start + TILE >= high):
                group_peak, group_total, group_acc = _merge(
                    group_peak, group_total, group_acc, peak, total, acc
                )
                of = tl.minimum(start // group, groups - 1)
                ends = start + TILE >= tl.where(of == groups - 1, length, (of + 1) * group)
                apart = low > first_low  # each part of a group that another program began
                if ends | apart | (start + TILE >= high):
                    place = tl.where(
                        cut_group, group_place + first_part + start // PART, GROUP_PLACES + first_group + of
                    )
                    at_place = place * HEADS + head
                    tl.store(partial_ptr + at_place * D + d, group_acc)
                    tl.store(peak_ptr + at_place, group_peak)
                    tl.store(total_ptr + at_place, group_total)
                    group_peak = -float("inf")
                    group_total = 0.0
                    group_acc = tl.zeros((D,), tl.float32)
                peak = -float("inf")
                total = 0.0
                acc = tl.zeros((D,), tl.float32)
        tl.debug_barrier()  # the whole program's stores come before its arrival
        complete = tl.minimum((high - 1) // group, groups - 1) - first + 1
        if cut_group:
            arrived = group_arrived_ptr + (first_group + first) * HEADS + head
            parts = tl.cdiv(first_high - first_low, PART)
            mine = tl.cdiv(high - low, PART)
            complete = 0
            if tl.atomic_add(arrived, mine, sem="acq_rel", scope="gpu") == parts - mine:
                tl.store(arrived, 0)
                merged = num_parts * (owner + 1) // RANGES - 1  # the last part before the first cut
                group_peak, group_total, group_acc = _merge_run(
                    partial_ptr,
                    peak_ptr,
                    total_ptr,
                    group_place + merged,
                    group_place + group_part + parts,
                    head,
                    HEADS,
                    D,
                    UNROLL,
                )
                at_place = (GROUP_PLACES + first_group + first) * HEADS + head
                tl.store(partial_ptr + at_place * D + d, group_acc)
                tl.store(peak_ptr + at_place, group_peak)
                tl.store(total_ptr + at_place, group_total)
                tl.debug_barrier()
                complete = 1
        if complete > 0:
            arrived = lane_arrived_ptr + lane * HEADS + head
            if tl.atomic_add(arrived, complete, sem="acq_rel", scope="gpu") == groups - complete:
                tl.store(arrived, 0)
                place = GROUP_PLACES + first_group
                peak, total, acc = _merge_run(
                    partial_ptr, peak_ptr, total_ptr, place, place + groups, head, HEADS, D, UNROLL
                )
                tl.store(out_ptr + (lane.to(tl.int64) * HEADS + head) * D + d, (acc / total).to(kind))
        part = first_part + tl.cdiv(high, PART)
        lane += (high == length).to(tl.int32)
        if (part == stop) & (cut_begin < stop):  # now what comes before the group that is cut
            part, limit, lane = begin, cut_begin, first_lane
            cut_begin = stop
    if PDL and not EARLY:
        gdc_launch_dependents()


SIZES = {
    "PART": PART,
    "SHORT_LENGTH": SHORT_LENGTH,
    "SHORT_GROUP": SHORT_GROUP,
    "LONG_GROUP": LONG_GROUP,
}


def max_groups(max_lanes: int, max_length: int) -> int:
    """Groups that a round can have."""
    short = min(max_length, SHORT_LENGTH)
    longest = max((n + size // 2) // size for n, size in ((short, SHORT_GROUP), (max_length, LONG_GROUP)))
    return max_lanes * max(longest, 1)


class WorkList:
    """Buffers of one round's attention work, for up to ``max_lanes`` lanes. Integers are int32.

    ``table_index`` [lanes]: row of the flat slot table [T * rows, max_length] of each lane; ``length``
    [lanes], the position of the lane's new token included; ``first_part``, ``first_group`` [lanes]: how
    many the lanes before it have. ``num_parts`` [1] of all lanes; ``range_begin`` [ranges + 1]: the first
    part of each range and all parts; ``range_lane`` [ranges]: the lane of a range's first part.

    Partial results: PLACES for each range, then one for each group; ``partial`` fp32 [places, heads, D],
    ``peak``, ``total`` [places, heads]. ``group_arrived`` [groups * heads] and ``lane_arrived`` [lanes *
    heads] count parts and groups that are there; zero between launches.
    """

    def __init__(
        self, max_lanes: int, max_length: int, heads: int, head_dim: int, ranges: int, device: torch.device
    ) -> None:
        groups = max_groups(max_lanes, max_length)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.float32, device=device)

        # positions in the cut are products of parts and ranges, in 32 bits
        most_parts = max_lanes * -(-max_length // PART) + 1
        self.ranges = ranges = max(min(ranges, (2**31 - 1) // most_parts), 1)
        self.table_index, self.length = ints(max_lanes), ints(max_lanes)
        self.first_part, self.first_group = ints(max_lanes), ints(max_lanes)
        self.range_begin, self.range_lane = ints(ranges + 1), ints(ranges)
        self.num_parts = ints(1)
        self.group_arrived, self.lane_arrived = ints(groups * heads), ints(max_lanes * heads)
        places = ranges * PLACES + groups
        self.partial = numbers(places, heads, head_dim)
        self.peak, self.total = numbers(places, heads), numbers(places, heads)

    def fill(self, table_index: list[int], lengths: list[int]) -> None:
        """What ``begin_round_kernel`` writes for such lanes."""
        sizes = [SHORT_GROUP if length <= SHORT_LENGTH else LONG_GROUP for length in lengths]
        groups = [max((n + size // 2) // size, 1) for n, size in zip(lengths, sizes, strict=True)]
        parts = [-(-length // PART) for length in lengths]
        first_part = [sum(parts[:lane]) for lane in range(len(lengths))]
        begins = [
            part + number * size // PART
            for part, size, count in zip(first_part, sizes, groups, strict=True)
            for number in range(count)
        ]
        ranges, total = self.ranges, sum(parts)
        longest = max((b - a for a, b in itertools.pairwise([*begins, total])), default=0)
        if len(begins) <= ranges and (longest - 1) * ranges <= total + ranges // 4:
            begins += [total] * (ranges - len(begins))
        else:
            begins = [total * number // ranges for number in range(ranges)]
        lane_of_part = [lane for lane, count in enumerate(parts) for _ in range(count)]
        for target, values in (
            (self.table_index, table_index),
            (self.length, lengths),
            (self.first_part, first_part),
            (self.first_group, [sum(groups[:lane]) for lane in range(len(lengths))]),
            (self.range_begin, [*begins, total]),
            (self.range_lane, [lane_of_part[begin] for begin in begins if begin < total]),
            (self.num_parts, [total]),
        ):
            target[: len(values)] = torch.tensor(values, dtype=torch.int32)


def decode_attention(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    work: WorkList,
    out: torch.Tensor,
    scale: float,
    stages: int = 2,
    warps: int = 2,
    pdl: bool = False,
    early: bool = False,
) -> None:
    """Per lane of ``work``: K and V of its new position to their slot, then attention over all its slots.

    qkv [B, (heads + 2 kv_heads) * D], before rope; keys, values [num_slots, kv_heads, D] of one layer;
    table int32 [T * rows, max_length]; cos, sin [max_position, D / 2]; out [B, heads, D]. Lanes that
    ``work`` does not hold are not written. ``early``: under ``pdl`` the next kernel may start as soon as
    all programs have, for one that asks for its weights meanwhile (``hopper_products``).
    """
    _, heads, head_dim = out.shape
    _decode_kernel[(work.ranges * heads,)](
        qkv,
        cos,
        sin,
        keys,
        values,
        table,
        work.table_index,
        work.length,
        work.first_part,
        work.first_group,
        work.range_begin,
        work.range_lane,
        work.num_parts,
        work.partial,
        work.peak,
        work.total,
        work.group_arrived,
        work.lane_arrived,
        out,
        table.shape[1],
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=head_dim,
        TILE=TILE,
        UNROLL=UNROLL,
        PLACES=PLACES,
        RANGES=work.ranges,
        STAGES=stages,
        **SIZES,
        EARLY=early,
        PDL=pdl,
        num_warps=warps,
        maxnreg=MAX_REGISTERS,
        **pdl_launch(pdl),
    )


def decode_attention_twin(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table_index: torch.Tensor,
    length: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[lanes, heads, D] fp32, one lane at a time; writes K and V as the kernel does."""
    from ouro_kernels.triton_ops.prefill import rope_twin

    kv_heads, head_dim = keys.shape[1:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    positions = (length - 1).long()
    query, key, value = rope_twin(qkv, heads, kv_heads, positions, cos, sin)
    rows = []
    for lane in range(len(qkv)):
        slots = table[int(table_index[lane]), : int(length[lane])].long()
        keys[slots[-1]], values[slots[-1]] = key[lane], value[lane]
        all_keys = keys[slots].float().repeat_interleave(heads // kv_heads, 1)
        all_values = values[slots].float().repeat_interleave(heads // kv_heads, 1)
        score = torch.einsum("hd,nhd->hn", query[lane].float(), all_keys) * scale
        rows.append(torch.einsum("hn,nhd->hd", torch.softmax(score, -1), all_values))
    return torch.stack(rows)
