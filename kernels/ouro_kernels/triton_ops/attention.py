"""Decode attention at page size 1 over a device-built work list, rope and K/V write included.

Bits: a lane's keys are cut into parts of ``PART`` tokens at absolute positions and, by the lane's own
length, groups of parts (``num_groups``). A part is one chain over its tiles of ``TILE`` tokens; the
parts of a group are merged in order, then the groups in order, always by ``_merge``. Who computes what
may depend on the batch: a work item is a few parts of a group (few lanes: more programs; each part is
a partial result) or one or two whole groups (many lanes: a partial result of each), and all give the
same chain of operations; whichever program of a group, and then of a lane and head, finishes last
merges. The list is built once per round on the device and read by all layers; programs are persistent,
so one captured launch serves any lengths. Slot offsets are int64.
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
ENOUGH_ITEMS = 56  # per head; a round with so many groups takes whole ones, with so many pairs those
UNROLL = 16  # partial results whose loads are in flight together
MAX_REGISTERS = 128  # of a thread: eight programs per SM


@triton.jit
def group_size(length, SHORT_LENGTH: tl.constexpr, SHORT_GROUP: tl.constexpr, LONG_GROUP: tl.constexpr):
    """Tokens of every group of a lane but the last, which has half as many to half as many again."""
    return tl.where(length <= SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)


@triton.jit
def num_groups(length, group):
    return tl.maximum((length + group // 2) // group, 1)


@triton.jit
def item_span(
    parts, groups, pairs, PART: tl.constexpr, SHORT_GROUP: tl.constexpr, ENOUGH_ITEMS: tl.constexpr
):
    """Tokens of an item in a round of so many parts, groups and pairs of them; -1, -2: so many groups."""
    few = groups < ENOUGH_ITEMS
    span = tl.where(few, PART, tl.where(pairs < ENOUGH_ITEMS, -1, -2))
    for doubling in tl.static_range((SHORT_GROUP // PART).bit_length() - 1):
        span = tl.where(few & (parts >= (ENOUGH_ITEMS << (doubling + 1))), PART << (doubling + 1), span)
    return span


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
    item_lane_ptr,
    item_start_ptr,
    num_items_ptr,
    span_ptr,
    partial_ptr,
    peak_ptr,
    total_ptr,
    group_arrived_ptr,
    lane_arrived_ptr,
    out_ptr,
    table_stride,
    max_parts,
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
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    items = tl.load(num_items_ptr) * HEADS
    span = tl.load(span_ptr)
    fine = span > 0
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    kind = out_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    SHARE: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        if tl.program_id(0) < items:
            # the work list and the table are older than the kernel before
            item = tl.program_id(0) // HEADS
            lane = tl.load(item_lane_ptr + item)
            places = table_ptr + tl.load(table_index_ptr + lane).to(tl.int64) * table_stride
            at = tl.load(item_start_ptr + item) + tl.arange(0, PART)
            _touch(tl.load(places + at, mask=at < tl.load(length_ptr + lane), other=0))
            _touch(tl.load(first_part_ptr + lane) + tl.load(first_group_ptr + lane))
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    for work in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        item = work // HEADS
        head = work % HEADS
        kv_head = head // SHARE
        lane = tl.load(item_lane_ptr + item)
        low = tl.load(item_start_ptr + item)
        length = tl.load(length_ptr + lane)
        first_part = tl.load(first_part_ptr + lane).to(tl.int64)
        first_group = tl.load(first_group_ptr + lane).to(tl.int64)
        group = group_size(length, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)
        groups = num_groups(length, group)
        number = tl.minimum(low // group, groups - 1)  # of the item's first group
        last = tl.where(fine, number, tl.minimum(number - span, groups) - 1)
        group_end = tl.where(last == groups - 1, length, (last + 1) * group)
        high = tl.where(fine, tl.minimum(low + span, group_end), group_end)
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
        inner = kv_head * D + d[None, :]
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
                if fine:
                    place = (first_part + start // PART) * HEADS + head
                    tl.store(partial_ptr + place * D + d, acc)
                    tl.store(peak_ptr + place, peak)
                    tl.store(total_ptr + place, total)
                else:
                    group_peak, group_total, group_acc = _merge(
                        group_peak, group_total, group_acc, peak, total, acc
                    )
                    following = (start + TILE) // group
                    if (start + TILE >= high) | (((start + TILE) % group == 0) & (following <= last)):
                        place = (max_parts + first_group + tl.minimum(start // group, last)) * HEADS + head
                        tl.store(partial_ptr + place * D + d, group_acc)
                        tl.store(peak_ptr + place, group_peak)
                        tl.store(total_ptr + place, group_total)
                        group_peak = -float("inf")
                        group_total = 0.0
                        group_acc = tl.zeros((D,), tl.float32)
                peak = -float("inf")
                total = 0.0
                acc = tl.zeros((D,), tl.float32)
        complete = True
        if fine:
            tl.debug_barrier()  # the whole program's stores come before its arrival
            arrived = group_arrived_ptr + (first_group + number) * HEADS + head
            mine = tl.cdiv(group_end - number * group, span)
            complete = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == mine - 1
            if complete:
                tl.store(arrived, 0)
                group_peak, group_total, group_acc = _merge_run(
                    partial_ptr,
                    peak_ptr,
                    total_ptr,
                    first_part + number * (group // PART),
                    first_part + tl.cdiv(group_end, PART),
                    head,
                    HEADS,
                    D,
                    UNROLL,
                )
                place = (max_parts + first_group + number) * HEADS + head
                tl.store(partial_ptr + place * D + d, group_acc)
                tl.store(peak_ptr + place, group_peak)
                tl.store(total_ptr + place, group_total)
        if complete:
            tl.debug_barrier()
            arrived = lane_arrived_ptr + lane * HEADS + head
            mine = last - number + 1
            if tl.atomic_add(arrived, mine, sem="acq_rel", scope="gpu") == groups - mine:
                tl.store(arrived, 0)
                begin = max_parts + first_group
                peak, total, acc = _merge_run(
                    partial_ptr, peak_ptr, total_ptr, begin, begin + groups, head, HEADS, D, UNROLL
                )
                tl.store(out_ptr + (lane.to(tl.int64) * HEADS + head) * D + d, (acc / total).to(kind))
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


# Parts of a round whose items are not whole groups: fewer than ENOUGH_ITEMS groups, each of less than
# one and a half times its size.
MAX_PARTS = ENOUGH_ITEMS * 3 * LONG_GROUP // 2 // PART


class WorkList:
    """Buffers of one round's attention work, for up to ``max_lanes`` lanes. Integers are int32.

    ``table_index`` [lanes]: row of the flat slot table [T * rows, max_length] of each lane; ``length``
    [lanes], the position of the lane's new token included; ``first_part``, ``first_group`` [lanes]: how
    many the lanes before it have. ``item_lane``, ``item_start`` (a position) [items]: all but the last
    item of every lane come first, all of about one length, so that the programs share them evenly.
    ``num_items`` [1]; ``span`` [1]: tokens of an item (a few parts), or -1, -2 for so many whole groups.

    Partial results, of parts in the first MAX_PARTS places and of groups behind them: ``partial`` fp32
    [places, heads, D], ``peak``, ``total`` [places, heads]. ``group_arrived`` [groups * heads] and
    ``lane_arrived`` [lanes * heads] count what is there; zero between launches.
    """

    def __init__(
        self, max_lanes: int, max_length: int, heads: int, head_dim: int, device: torch.device
    ) -> None:
        groups = max_groups(max_lanes, max_length)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.float32, device=device)

        self.table_index, self.length = ints(max_lanes), ints(max_lanes)
        self.first_part, self.first_group = ints(max_lanes), ints(max_lanes)
        items = max(groups, MAX_PARTS)
        self.item_lane, self.item_start = ints(items), ints(items)
        self.num_items, self.span = ints(1), ints(1)
        self.group_arrived, self.lane_arrived = ints(groups * heads), ints(max_lanes * heads)
        places = MAX_PARTS + groups
        self.partial = numbers(places, heads, head_dim)
        self.peak, self.total = numbers(places, heads), numbers(places, heads)

    def fill(self, table_index: list[int], lengths: list[int]) -> None:
        """What ``begin_round_kernel`` writes for such lanes."""
        sizes = [SHORT_GROUP if length <= SHORT_LENGTH else LONG_GROUP for length in lengths]
        groups = [max((n + size // 2) // size, 1) for n, size in zip(lengths, sizes, strict=True)]
        parts = [-(-length // PART) for length in lengths]
        pairs = sum(-(-count // 2) for count in groups)
        span = -1 if pairs < ENOUGH_ITEMS else -2
        if sum(groups) < ENOUGH_ITEMS:
            span = PART
            while span < SHORT_GROUP and sum(parts) >= ENOUGH_ITEMS * 2 * span // PART:
                span *= 2
        starts = [
            range(0, length, span) if span > 0 else range(0, count * size, -span * size)
            for length, count, size in zip(lengths, groups, sizes, strict=True)
        ]
        full = [(lane, at) for lane, mine in enumerate(starts) for at in mine[:-1]]
        items = full + [(lane, mine[-1]) for lane, mine in enumerate(starts)]
        lanes = range(len(lengths))
        for target, values in (
            (self.table_index, table_index),
            (self.length, lengths),
            (self.first_part, [sum(parts[:lane]) for lane in lanes]),
            (self.first_group, [sum(groups[:lane]) for lane in lanes]),
            (self.item_lane, [lane for lane, _ in items]),
            (self.item_start, [at for _, at in items]),
            (self.num_items, [len(items)]),
            (self.span, [span]),
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
    programs: int,
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
    _decode_kernel[(programs,)](
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
        work.item_lane,
        work.item_start,
        work.num_items,
        work.span,
        work.partial,
        work.peak,
        work.total,
        work.group_arrived,
        work.lane_arrived,
        out,
        table.shape[1],
        MAX_PARTS,
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=head_dim,
        TILE=TILE,
        UNROLL=UNROLL,
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
