"""Decode attention at page size 1 over a device-built work list, rope and K/V write included.

Bits: a lane's keys are cut into parts of ``PART`` tokens at absolute positions and, by the lane's own
length, groups of parts (``num_groups``). A part is one chain over its tiles of ``TILE`` tokens; the
parts of a group are merged in order, then the groups in order, always by ``_merge``.

Who computes what depends on the batch: the parts of all lanes, end to end, are cut into ranges of equal
width, one for each head and program, so that the programs end together at any lengths. A program merges
the parts of a group for as long as it has all those before them; of a group that begins in an earlier
range it writes each part. Whichever program of a group, and then of a lane and head, finishes last
merges what was written: the same chain of operations wherever the cuts are. The list is built once per
round on the device and read by all layers, so one captured launch serves any lengths. Slot offsets are
int64.
"""

from __future__ import annotations

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
# Parts of the longest group: one and a half times its size. A range has that many places for parts that
# it writes one by one, less the first of them, and one for those that it merged.
PLACES = 3 * LONG_GROUP // 2 // PART


@triton.jit
def group_size(length, SHORT_LENGTH: tl.constexpr, SHORT_GROUP: tl.constexpr, LONG_GROUP: tl.constexpr):
    """Tokens of every group of a lane but the last, which has half as many to half as many again."""
    return tl.where(length <= SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)


@triton.jit
def num_groups(length, group):
    return tl.maximum((length + group // 2) // group, 1)


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
def _keep(
    partial_ptr, peak_ptr, total_ptr, place, head, peak, total, acc, HEADS: tl.constexpr, D: tl.constexpr
):
    """Write a partial result."""
    at = place.to(tl.int64) * HEADS + head
    tl.store(partial_ptr + at * D + tl.arange(0, D), acc)
    tl.store(peak_ptr + at, peak)
    tl.store(total_ptr + at, total)


@triton.jit
def _merge_run(
    partial_ptr,
    peak_ptr,
    total_ptr,
    begin,
    end,
    width,
    head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    UNROLL: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Merge partial results ``begin .. end - 1`` in order, from L2: other programs wrote them. With PLACES
    those of parts, the first with all before it in its group; without, those at such places."""
    d = tl.arange(0, D)
    peak = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for start in tl.range(begin, end, UNROLL):
        for offset in tl.static_range(UNROLL):
            number = start + offset
            exists = number < end
            place = number
            if PLACES > 0:
                owner = number // width
                own = tl.where(number == begin, PLACES - 1, number - owner * width)
                place = owner * PLACES + own
            at = place.to(tl.int64) * HEADS + head
            # a place past the end adds exact zeros
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
    range_lane_ptr,
    num_parts_ptr,
    width_ptr,
    partial_ptr,
    peak_ptr,
    total_ptr,
    group_arrived_ptr,
    lane_arrived_ptr,
    out_ptr,
    table_stride,
    group_places,
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
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    own_range = tl.program_id(0) // HEADS
    width = tl.load(width_ptr)
    begin = own_range * width
    stop = tl.minimum(begin + width, tl.load(num_parts_ptr))
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    kind = out_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    SHARE: tl.constexpr = HEADS // KV_HEADS
    kv_head = head // SHARE
    inner = kv_head * D + d[None, :]
    if PDL:
        if begin < stop:
            # the work list and the table are older than the kernel before
            lane = tl.load(range_lane_ptr + own_range)
            places = table_ptr + tl.load(table_index_ptr + lane).to(tl.int64) * table_stride
            at = (begin - tl.load(first_part_ptr + lane)) * PART + tl.arange(0, PART)
            _touch(tl.load(places + at, mask=at < tl.load(length_ptr + lane), other=0))
            _touch(tl.load(first_group_ptr + lane))
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    part = begin
    lane = tl.load(range_lane_ptr + own_range, mask=begin < stop, other=0)
    while part < stop:
        length = tl.load(length_ptr + lane)
        first_part = tl.load(first_part_ptr + lane)
        first_group = tl.load(first_group_ptr + lane)
        low = (part - first_part) * PART
        high = tl.minimum((stop - first_part) * PART, length)
        group = group_size(length, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)
        groups = num_groups(length, group)
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
                number = tl.minimum(start // group, groups - 1)
                if number * group >= low:
                    group_peak, group_total, group_acc = _merge(
                        group_peak, group_total, group_acc, peak, total, acc
                    )
                    whole = start + TILE >= tl.where(number == groups - 1, length, (number + 1) * group)
                    if whole | (start + TILE >= high):
                        place = tl.where(
                            whole, group_places + first_group + number, (own_range + 1) * PLACES - 1
                        )
                        _keep(
                            partial_ptr,
                            peak_ptr,
                            total_ptr,
                            place,
                            head,
                            group_peak,
                            group_total,
                            group_acc,
                            HEADS,
                            D,
                        )
                        group_peak = -float("inf")
                        group_total = 0.0
                        group_acc = tl.zeros((D,), tl.float32)
                else:
                    place = own_range * PLACES + first_part + start // PART - begin
                    _keep(partial_ptr, peak_ptr, total_ptr, place, head, peak, total, acc, HEADS, D)
                peak = -float("inf")
                total = 0.0
                acc = tl.zeros((D,), tl.float32)
        first = tl.minimum(low // group, groups - 1)
        last = tl.minimum((high - 1) // group, groups - 1)
        complete = last - first + 1
        tl.debug_barrier()  # the whole program's stores come before its arrival
        for edge in tl.range(0, 1 + (first < last).to(tl.int32)):
            number = tl.where(edge == 0, first, last)
            group_low = number * group
            group_high = tl.where(number == groups - 1, length, group_low + group)
            if (low > group_low) | (high < group_high):
                arrived = group_arrived_ptr + (first_group + number) * HEADS + head
                parts = tl.cdiv(group_high - group_low, PART)
                mine = tl.cdiv(tl.minimum(high, group_high) - tl.maximum(low, group_low), PART)
                if tl.atomic_add(arrived, mine, sem="acq_rel", scope="gpu") == parts - mine:
                    tl.store(arrived, 0)
                    group_begin = first_part + group_low // PART
                    merged = (group_begin // width + 1) * width - 1  # up to there by one program
                    group_peak, group_total, group_acc = _merge_run(
                        partial_ptr,
                        peak_ptr,
                        total_ptr,
                        merged,
                        group_begin + parts,
                        width,
                        head,
                        HEADS,
                        D,
                        UNROLL,
                        PLACES,
                    )
                    place = group_places + first_group + number
                    _keep(
                        partial_ptr,
                        peak_ptr,
                        total_ptr,
                        place,
                        head,
                        group_peak,
                        group_total,
                        group_acc,
                        HEADS,
                        D,
                    )
                    tl.debug_barrier()
                else:
                    complete -= 1
        if complete > 0:
            arrived = lane_arrived_ptr + lane * HEADS + head
            if tl.atomic_add(arrived, complete, sem="acq_rel", scope="gpu") == groups - complete:
                tl.store(arrived, 0)
                begin_groups = group_places + first_group
                peak, total, acc = _merge_run(
                    partial_ptr,
                    peak_ptr,
                    total_ptr,
                    begin_groups,
                    begin_groups + groups,
                    0,
                    head,
                    HEADS,
                    D,
                    UNROLL,
                    0,
                )
                tl.store(out_ptr + (lane.to(tl.int64) * HEADS + head) * D + d, (acc / total).to(kind))
        part = first_part + tl.cdiv(high, PART)
        lane += 1
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
    many the lanes before it have. ``num_parts`` [1] of all lanes; ``width`` [1]: parts of each range but
    the last that has any; ``range_lane`` [ranges]: the lane of a range's first part.

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

        self.ranges = ranges
        self.table_index, self.length = ints(max_lanes), ints(max_lanes)
        self.first_part, self.first_group = ints(max_lanes), ints(max_lanes)
        self.range_lane = ints(ranges)
        self.num_parts, self.width = ints(1), ints(1)
        self.group_arrived, self.lane_arrived = ints(groups * heads), ints(max_lanes * heads)
        places = ranges * PLACES + groups
        self.partial = numbers(places, heads, head_dim)
        self.peak, self.total = numbers(places, heads), numbers(places, heads)

    def fill(self, table_index: list[int], lengths: list[int]) -> None:
        """What ``begin_round_kernel`` writes for such lanes."""
        sizes = [SHORT_GROUP if length <= SHORT_LENGTH else LONG_GROUP for length in lengths]
        groups = [max((n + size // 2) // size, 1) for n, size in zip(lengths, sizes, strict=True)]
        parts = [-(-length // PART) for length in lengths]
        lane_of_part = [lane for lane, count in enumerate(parts) for _ in range(count)]
        width = max(-(-len(lane_of_part) // self.ranges), 1)
        for target, values in (
            (self.table_index, table_index),
            (self.length, lengths),
            (self.first_part, [sum(parts[:lane]) for lane in range(len(lengths))]),
            (self.first_group, [sum(groups[:lane]) for lane in range(len(lengths))]),
            (self.range_lane, lane_of_part[::width]),
            (self.num_parts, [len(lane_of_part)]),
            (self.width, [width]),
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
    all programs have, for one that asks for its weights meanwhile (``stream``).
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
        work.range_lane,
        work.num_parts,
        work.width,
        work.partial,
        work.peak,
        work.total,
        work.group_arrived,
        work.lane_arrived,
        out,
        table.shape[1],
        work.ranges * PLACES,
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=head_dim,
        TILE=TILE,
        UNROLL=UNROLL,
        PLACES=PLACES,
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
