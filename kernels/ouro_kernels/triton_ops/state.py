"""The state machine of a round as kernels: work list, exit decision, coda list, advance.

Row state is columns [R] int64 or fp32, one entry per row (``ouro_sgl/worker/rows.py`` owns them and
defines the states); lanes and exited rows are compacted in ascending row order. The plain-torch
twin of the whole machine is the CPU round (``ouro_sgl/worker/round.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ouro_kernels.triton_ops.attention import group_size, num_groups, whole_groups

LIVE = tl.constexpr(2)
CODA = tl.constexpr(3)
STALLED = tl.constexpr(4)
DONE = tl.constexpr(5)

MODE_OURO = tl.constexpr(0)
MODE_DELAYED = tl.constexpr(1)
MODE_RANDOM = tl.constexpr(2)
MODE_LOOKAHEAD = tl.constexpr(3)
MODE_TRACE = tl.constexpr(4)

REASON_LENGTH = tl.constexpr(1)
REASON_STOP_ID = tl.constexpr(2)
REASON_ERROR = tl.constexpr(5)


@triton.jit
def begin_round_kernel(
    state_ptr,
    position_ptr,
    depth_ptr,
    granted_ptr,
    table_ptr,
    lanes_ptr,
    lane_slot_ptr,
    count_ptr,
    table_index_ptr,
    length_ptr,
    first_part_ptr,
    first_group_ptr,
    range_begin_ptr,
    range_lane_ptr,
    num_parts_ptr,
    rows,
    table_stride,
    ranges,
    BR: tl.constexpr,
    BRANGES: tl.constexpr,
    PART: tl.constexpr,
    SHORT_LENGTH: tl.constexpr,
    SHORT_GROUP: tl.constexpr,
    LONG_GROUP: tl.constexpr,
):
    """One program: which rows run, and the attention work list of all of them, for all layers."""
    r = tl.arange(0, BR)
    exists = r < rows
    state = tl.load(state_ptr + r, mask=exists, other=0)
    position = tl.load(position_ptr + r, mask=exists, other=0)
    depth = tl.load(depth_ptr + r, mask=exists, other=0)
    granted = tl.load(granted_ptr + r, mask=exists, other=0)
    live = (state == LIVE) | (state == STALLED)
    runs = live & (position < granted)
    tl.store(state_ptr + r, tl.where(runs, LIVE, tl.where(live, STALLED, state)), mask=exists)

    lane = tl.cumsum(runs.to(tl.int32), 0) - 1
    tl.store(count_ptr, tl.sum(runs.to(tl.int32), 0))
    length = position + 1
    index = depth * rows + r
    slot = tl.load(table_ptr + index * table_stride + position, mask=runs, other=0)
    tl.store(lanes_ptr + lane, r, mask=runs)
    tl.store(lane_slot_ptr + lane, slot, mask=runs)
    tl.store(table_index_ptr + lane, index.to(tl.int32), mask=runs)
    tl.store(length_ptr + lane, length.to(tl.int32), mask=runs)

    group = group_size(length, SHORT_LENGTH, SHORT_GROUP, LONG_GROUP)
    parts = tl.where(runs, tl.cdiv(length, PART), 0).to(tl.int32)
    groups = tl.where(runs, num_groups(length, group), 0).to(tl.int32)
    first_part = tl.cumsum(parts, 0) - parts
    tl.store(first_part_ptr + lane, first_part, mask=runs)
    first_group = tl.cumsum(groups, 0) - groups
    tl.store(first_group_ptr + lane, first_group, mask=runs)

    num_parts = tl.sum(parts, 0)
    tl.store(num_parts_ptr, num_parts)
    of_group = group // PART
    longest = tl.where(groups > 1, tl.maximum(of_group, parts - (groups - 1) * of_group), parts)
    whole = whole_groups(tl.sum(groups, 0), tl.max(longest, 0), num_parts, ranges)
    number = tl.arange(0, BRANGES)
    begin = tl.where(whole, num_parts, num_parts * number // ranges)
    tl.store(range_begin_ptr + number, begin, mask=number <= ranges)
    tl.debug_barrier()
    # the ranges that begin in this lane
    some = tl.maximum(num_parts, 1)
    first = tl.where(whole, first_group, tl.cdiv(first_part * ranges, some))
    end = tl.where(whole, first_group + groups, tl.cdiv((first_part + parts) * ranges, some))
    count = tl.where(runs, end - first, 0)
    for number in tl.range(0, tl.max(count, 0)):
        mine = number < count
        tl.store(range_lane_ptr + first + number, lane, mask=mine)
        tl.store(
            range_begin_ptr + first + number, (first_part + number * of_group).to(tl.int32), mask=mine & whole
        )


@triton.jit
def finish_core_kernel(
    x_ptr,
    lanes_ptr,
    count_ptr,
    lane_slot_ptr,
    hidden_ptr,
    heads_ptr,
    head_bias_ptr,
    state_ptr,
    position_ptr,
    depth_ptr,
    survival_ptr,
    pending_ptr,
    coda_wait_ptr,
    mode_ptr,
    min_loops_ptr,
    max_loops_ptr,
    threshold_ptr,
    trace_ptr,
    replay_ptr,
    reports_ptr,
    lambdas_ptr,
    table_ptr,
    rows,
    table_stride,
    trace_stride,
    T: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
):
    """Per lane: keep h_t, decide whether the token leaves, point deeper table entries at its slot.

    ``heads`` fp32 [3, H]: exit gate, random lookahead, trained lookahead; ``head_bias`` fp32 [3]. A row
    that reports its lambdas gets the gate's value of this loop in ``lambdas`` fp32 [R, T], in any mode.
    Formulas and order as in ``ouro_kernels.exits.exit_decision``.
    """
    lane = tl.program_id(0)
    if lane >= tl.load(count_ptr):
        return
    row = tl.load(lanes_ptr + lane).to(tl.int64)
    d = tl.arange(0, BH)
    keep = d < H
    x = tl.load(x_ptr + lane * H + d, mask=keep, other=0.0)
    tl.store(hidden_ptr + row * H + d, x, mask=keep)

    mode = tl.load(mode_ptr + row)
    head = tl.where(mode == MODE_RANDOM, 1, tl.where(mode == MODE_LOOKAHEAD, 2, 0))
    weight = tl.load(heads_ptr + head * H + d, mask=keep, other=0.0)
    logit = tl.sum(x.to(tl.float32) * weight, 0) + tl.load(head_bias_ptr + head)
    score = 1.0 / (1.0 + tl.exp(-logit))

    loops = tl.load(depth_ptr + row) + 1
    if tl.load(reports_ptr + row) != 0:
        gate = tl.load(heads_ptr + d, mask=keep, other=0.0)
        value = tl.sum(x.to(tl.float32) * gate, 0) + tl.load(head_bias_ptr)
        tl.store(lambdas_ptr + row * T + loops - 1, 1.0 / (1.0 + tl.exp(-value)))
    min_loops = tl.load(min_loops_ptr + row)
    threshold = tl.load(threshold_ptr + row)
    position = tl.load(position_ptr + row)
    gated = (mode == MODE_OURO) | (mode == MODE_DELAYED)
    survival = tl.load(survival_ptr + row)
    survival = tl.where(gated, survival * (1.0 - score), survival)
    cdf = tl.where(loops >= T, 1.0, 1.0 - survival)
    early = threshold < 1.0
    crossed = early & (cdf >= threshold)
    announced = early & (score >= threshold)
    traced = tl.load(trace_ptr + row * trace_stride + position).to(tl.int64)
    leave = (mode == MODE_OURO) & crossed & (loops >= min_loops)
    leave = leave | ((mode == MODE_TRACE) & (loops >= traced))
    trigger = (mode == MODE_DELAYED) & crossed & (loops >= min_loops)
    looks = (mode == MODE_RANDOM) | (mode == MODE_LOOKAHEAD)
    trigger = trigger | (looks & announced & (loops + 1 >= min_loops))
    leave = leave | (tl.load(pending_ptr + row) != 0) | (loops >= tl.load(max_loops_ptr + row))
    leave = tl.where(position < tl.load(replay_ptr + row), loops >= traced, leave)

    tl.store(depth_ptr + row, loops)
    tl.store(survival_ptr + row, survival)
    tl.store(pending_ptr + row, (trigger & (leave == 0)).to(pending_ptr.dtype.element_ty))
    if leave:
        tl.store(state_ptr + row, CODA)
        tl.store(coda_wait_ptr + row, 0)
        slot = tl.load(lane_slot_ptr + lane)
        for depth in tl.static_range(1, T):
            entry = table_ptr + (depth * rows + row) * table_stride + position
            tl.store(entry, slot, mask=loops <= depth)


@triton.jit
def begin_coda_kernel(
    state_ptr,
    position_ptr,
    coda_wait_ptr,
    constrained_ptr,
    mask_position_ptr,
    replay_ptr,
    lane_count_ptr,
    exits_ptr,
    exit_count_ptr,
    rows,
    min_batch,
    T: tl.constexpr,
    BR: tl.constexpr,
):
    """One program: the rows whose logits are made now. All that wait, once they are enough, or one
    has waited T rounds, or nothing ran the core. A constrained row waits for its mask first, unless
    its position is replayed."""
    r = tl.arange(0, BR)
    exists = r < rows
    position = tl.load(position_ptr + r, mask=exists, other=0)
    free = tl.load(constrained_ptr + r, mask=exists, other=0) == 0
    masked = free | (tl.load(mask_position_ptr + r, mask=exists, other=-1) == position)
    masked = masked | (position < tl.load(replay_ptr + r, mask=exists, other=0))
    ready = (tl.load(state_ptr + r, mask=exists, other=0) == CODA) & masked
    number = tl.sum(ready.to(tl.int32), 0)
    waited = tl.load(coda_wait_ptr + r, mask=ready, other=-1) + 1
    go = (number >= min_batch) | (tl.load(lane_count_ptr) == 0) | (tl.max(waited, 0) >= T)
    tl.store(coda_wait_ptr + r, waited, mask=ready)
    index = tl.cumsum(ready.to(tl.int32), 0) - 1
    tl.store(exits_ptr + index, r, mask=ready)
    tl.store(exit_count_ptr, tl.where(go, number, 0))


@triton.jit
def advance_kernel(
    exits_ptr,
    exit_count_ptr,
    lane_count_ptr,
    tokens_ptr,
    bad_ptr,
    logprobs_ptr,
    embedding_ptr,
    hidden_ptr,
    state_ptr,
    epoch_ptr,
    position_ptr,
    depth_ptr,
    survival_ptr,
    pending_ptr,
    last_position_ptr,
    is_end_ptr,
    counts_ptr,
    replay_ptr,
    forced_ptr,
    reports_ptr,
    lambdas_ptr,
    events_ptr,
    capacity,
    V,
    forced_stride,
    T: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
):
    """Per exited row: append the event, test length, then end ids, and put the row on its new token.

    At a position before ``replay`` int64 [R] the token is that of ``forced`` int32 [R, positions] and
    nothing is tested.

    ``events`` int64 [9 + T, capacity]: row, epoch, position, token, exit depth, reason, log-probability
    (fp32 bits), a line whose first entries are the numbers of events and lanes, whether the row
    reports its lambdas, and these (fp32 bits).
    """
    i = tl.program_id(0)
    count = tl.load(exit_count_ptr)
    if i == 0:
        tl.store(events_ptr + 7 * capacity, count.to(tl.int64))
        tl.store(events_ptr + 7 * capacity + 1, tl.load(lane_count_ptr).to(tl.int64))
    if i >= count:
        return
    row = tl.load(exits_ptr + i).to(tl.int64)
    token = tl.load(tokens_ptr + i).to(tl.int64)
    position = tl.load(position_ptr + row)
    replayed = position < tl.load(replay_ptr + row)
    token = tl.where(replayed, tl.load(forced_ptr + row * forced_stride + position).to(tl.int64), token)
    ends = tl.load(is_end_ptr + row * V + token) != 0
    reason = tl.where(ends, REASON_STOP_ID, 0)
    reason = tl.where(position >= tl.load(last_position_ptr + row), REASON_LENGTH, reason)
    reason = tl.where(tl.load(bad_ptr + i) != 0, REASON_ERROR, reason)
    reason = tl.where(replayed, 0, reason)
    out = events_ptr + i
    tl.store(out, row)
    tl.store(out + capacity, tl.load(epoch_ptr + row))
    tl.store(out + 2 * capacity, position)
    tl.store(out + 3 * capacity, token)
    tl.store(out + 4 * capacity, tl.load(depth_ptr + row))
    tl.store(out + 5 * capacity, reason.to(tl.int64))
    tl.store(out + 6 * capacity, tl.load(logprobs_ptr + i).to(tl.int32, bitcast=True).to(tl.int64))

    reports = tl.load(reports_ptr + row)
    tl.store(out + 8 * capacity, reports)
    if reports != 0:
        for loop in tl.static_range(T):
            value = tl.load(lambdas_ptr + row * T + loop).to(tl.int32, bitcast=True)
            tl.store(out + (9 + loop) * capacity, value.to(tl.int64))

    seen = counts_ptr + row * V + token
    tl.store(seen, tl.load(seen) + 1)
    tl.debug_barrier()  # every warp has read the position, which picks a forced token
    tl.store(position_ptr + row, position + 1)
    tl.store(depth_ptr + row, 0)
    tl.store(survival_ptr + row, 1.0)
    tl.store(pending_ptr + row, 0)
    d = tl.arange(0, BH)
    embedding = tl.load(embedding_ptr + token * H + d, mask=d < H, other=0.0)
    tl.store(hidden_ptr + row * H + d, embedding, mask=d < H)
    tl.store(state_ptr + row, tl.where(reason == 0, LIVE, DONE))
