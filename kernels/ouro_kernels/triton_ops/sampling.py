"""Sampling of the exited rows: logit processing, arg-max or Gumbel-max, filters, log-probability.

Two kernels. ``process`` runs over (row, vocabulary block): it rewrites the logits in place after
penalties, the hold on end ids, the grammar's mask, bias and temperature, and leaves each block's
maximum, sum of exponentials and best perturbed logit. ``select``, one program per row, merges the
blocks in order; a row with top-k, top-p or min-p finds its thresholds by bisection on the value's bit
pattern. Both return at once for places past the number of exited rows. Meaning of every parameter:
``ouro_kernels/sampling.py``, the twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def _shift_right(x, bits: tl.constexpr):
    mask: tl.constexpr = (1 << (64 - bits)) - 1
    return (x >> bits) & mask


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def gumbel(seed, counter, ids):
    """Noise for token ``ids`` int64 of one row: a function of (seed, output index, id) alone."""
    state = _mix(_mix(seed) + counter * _GOLDEN)
    bits = _shift_right(_mix(state + (ids + 1) * _GOLDEN), 41)
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _order(x):
    """fp32 as an int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def process_kernel(
    logits_ptr,
    exits_ptr,
    exit_count_ptr,
    position_ptr,
    prompt_length_ptr,
    temperature_ptr,
    seed_ptr,
    min_new_ptr,
    penalised_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_ptr,
    counts_ptr,
    prompt_seen_ptr,
    constrained_ptr,
    mask_ptr,
    biased_ptr,
    bias_ptr,
    is_end_ptr,
    best_ptr,
    best_id_ptr,
    sum_ptr,
    drawn_ptr,
    drawn_id_ptr,
    bad_ptr,
    V,
    blocks,
    BV: tl.constexpr,
):
    i = tl.program_id(0)
    if i >= tl.load(exit_count_ptr):
        return
    row = tl.load(exits_ptr + i).to(tl.int64)
    block = tl.program_id(1)
    v = block * BV + tl.arange(0, BV)
    keep = v < V
    at = logits_ptr + i.to(tl.int64) * V + v
    x = tl.load(at, mask=keep, other=0.0)
    bad = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 0)
    x = tl.where(bad != 0, 0.0, x)
    if tl.load(penalised_ptr + row) != 0:
        seen = tl.load(counts_ptr + row * V + v, mask=keep, other=0)
        in_prompt = tl.load(prompt_seen_ptr + row * V + v, mask=keep, other=0) != 0
        generated = seen > 0
        x = x - tl.load(frequency_ptr + row) * seen.to(tl.float32)
        x = x - tl.load(presence_ptr + row) * generated.to(tl.float32)
        scale = tl.where(generated | in_prompt, tl.load(repetition_ptr + row), 1.0)
        x = tl.where(x < 0, x * scale, x / scale)
    output_index = tl.load(position_ptr + row) - tl.load(prompt_length_ptr + row) + 1
    if output_index < tl.load(min_new_ptr + row):
        ends = tl.load(is_end_ptr + row * V + v, mask=keep, other=0) != 0
        x = tl.where(ends, -float("inf"), x)
    if tl.load(constrained_ptr + row) != 0:
        words = tl.load(mask_ptr + row * tl.cdiv(V, 32) + v // 32, mask=keep, other=0)
        x = tl.where(((words >> (v % 32)) & 1) != 0, x, -float("inf"))
    if tl.load(biased_ptr + row) != 0:
        x = x + tl.load(bias_ptr + row * V + v, mask=keep, other=0.0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        x = x / temperature
    tl.store(at, x, mask=keep)
    x = tl.where(keep, x, -float("inf"))

    out = i * blocks + block
    best = tl.max(x, 0)
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, tl.min(tl.where(x == best, v, V), 0))
    tl.store(sum_ptr + out, tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - best)), 0))
    tl.store(bad_ptr + out, bad)
    if temperature > 0.0:
        noisy = x + gumbel(tl.load(seed_ptr + row), output_index, v.to(tl.int64))
        drawn = tl.max(noisy, 0)
        tl.store(drawn_ptr + out, drawn)
        tl.store(drawn_id_ptr + out, tl.min(tl.where(noisy == drawn, v, V), 0))


@triton.jit
def select_kernel(
    logits_ptr,
    exits_ptr,
    exit_count_ptr,
    position_ptr,
    prompt_length_ptr,
    temperature_ptr,
    seed_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    best_id_ptr,
    sum_ptr,
    drawn_ptr,
    drawn_id_ptr,
    block_bad_ptr,
    tokens_ptr,
    logprobs_ptr,
    log_sum_ptr,
    bad_ptr,
    V,
    blocks,
    BLOCKS: tl.constexpr,
    BV: tl.constexpr,
):
    i = tl.program_id(0)
    if i >= tl.load(exit_count_ptr):
        return
    row = tl.load(exits_ptr + i).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    keep = b < blocks
    here = i * blocks + b
    bests = tl.load(best_ptr + here, mask=keep, other=-float("inf"))
    best = tl.max(bests, 0)
    ids = tl.load(best_id_ptr + here, mask=keep, other=V)
    token = tl.min(tl.where(bests == best, ids, V), 0)
    sums = tl.load(sum_ptr + here, mask=keep, other=0.0)
    total = tl.sum(tl.where(bests == -float("inf"), 0.0, sums * tl.exp(bests - best)), 0)
    log_sum = best + tl.log(total)
    greedy_token = token
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    base = logits_ptr + i.to(tl.int64) * V
    lane = tl.arange(0, BV)
    if temperature > 0.0:
        filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
        if filtered == 0:
            drawns = tl.load(drawn_ptr + here, mask=keep, other=-float("inf"))
            drawn_ids = tl.load(drawn_id_ptr + here, mask=keep, other=V)
            token = tl.min(tl.where(drawns == tl.max(drawns, 0), drawn_ids, V), 0)
        else:
            limit_k = tl.where(top_k > 0, top_k, V).to(tl.int32)
            limit_p = tl.where(top_p < 1.0, top_p, 2.0)
            # smallest order value t with count(> t) < k, and with mass(> t) <= p
            low_k = tl.full((), -2147483648, tl.int64)
            high_k = tl.full((), 2147483647, tl.int64)
            low_p = low_k
            high_p = high_k
            for _ in tl.range(0, 32):
                mid_k = (low_k + high_k) >> 1
                mid_p = (low_p + high_p) >> 1
                above_k = tl.zeros((BV,), tl.int32)
                above_p = tl.zeros((BV,), tl.float32)
                for start in tl.range(0, V, BV):
                    v = start + lane
                    x = tl.load(base + v, mask=v < V, other=-float("inf"))
                    order = _order(x).to(tl.int64)
                    above_k += (order > mid_k).to(tl.int32)
                    above_p += tl.where(order > mid_p, tl.exp(x - log_sum), 0.0)
                if tl.sum(above_k, 0) < limit_k:
                    high_k = mid_k
                else:
                    low_k = mid_k + 1
                if tl.sum(above_p, 0) <= limit_p:
                    high_p = mid_p
                else:
                    low_p = mid_p + 1
            count_k = tl.zeros((BV,), tl.int32)
            mass_p = tl.zeros((BV,), tl.float32)
            for start in tl.range(0, V, BV):
                v = start + lane
                x = tl.load(base + v, mask=v < V, other=-float("inf"))
                order = _order(x).to(tl.int64)
                count_k += (order > high_k).to(tl.int32)
                mass_p += tl.where(order > high_p, tl.exp(x - log_sum), 0.0)
            room_k = limit_k - tl.sum(count_k, 0)  # how many of the value at the cut stay
            room_p = limit_p - tl.sum(mass_p, 0)
            cut = tl.maximum(high_k, high_p)
            least = min_p * tl.exp(best - log_sum)
            seed = tl.load(seed_ptr + row)
            output_index = tl.load(position_ptr + row) - tl.load(prompt_length_ptr + row) + 1
            ties = tl.zeros((), tl.int32)
            drawn = tl.full((), -float("inf"), tl.float32)
            for start in tl.range(0, V, BV):
                v = start + lane
                x = tl.load(base + v, mask=v < V, other=-float("inf"))
                order = _order(x).to(tl.int64)
                tied = (order == cut) & (v < V)
                rank = ties + tl.cumsum(tied.to(tl.int32), 0) - 1
                ties += tl.sum(tied.to(tl.int32), 0)
                probability = tl.exp(x - log_sum)
                stays = (order > cut) | (
                    tied
                    & ((cut != high_k) | (rank < room_k))
                    & ((cut != high_p) | (rank.to(tl.float32) * probability <= room_p))
                )
                stays = (stays & (probability >= least)) | (v == greedy_token)
                noisy = x + gumbel(seed, output_index, v.to(tl.int64))
                noisy = tl.where(stays & (v < V), noisy, -float("inf"))
                block_best = tl.max(noisy, 0)
                block_id = tl.min(tl.where(noisy == block_best, v, V), 0)
                token = tl.where(block_best > drawn, block_id, token)
                drawn = tl.maximum(drawn, block_best)
    tl.store(tokens_ptr + i, token)
    tl.store(logprobs_ptr + i, tl.load(base + token) - log_sum)
    tl.store(log_sum_ptr + i, log_sum)
    bads = tl.load(block_bad_ptr + here, mask=keep, other=0)
    tl.store(bad_ptr + i, tl.max(bads, 0))


@triton.jit
def _log_sum_kernel(logits_ptr, out_ptr, V, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BV)
    peak = tl.full((BV,), -float("inf"), tl.float32)
    for start in tl.range(0, V, BV):
        v = start + lane
        x = tl.load(logits_ptr + row * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
        peak = tl.maximum(peak, x)
    top = tl.max(peak, 0)
    total = tl.zeros((BV,), tl.float32)
    for start in tl.range(0, V, BV):
        v = start + lane
        x = tl.load(logits_ptr + row * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
        total += tl.exp(x - top)
    tl.store(out_ptr + row, top + tl.log(tl.sum(total, 0)))


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) of logits [M, V]: [M] fp32, each row in one fixed order."""
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    block = min(4096, triton.next_power_of_2(logits.shape[1]))
    _log_sum_kernel[(logits.shape[0],)](logits, out, logits.shape[1], BV=block, num_warps=8)
    return out
