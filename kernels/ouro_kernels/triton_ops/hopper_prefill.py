"""Prefill attention in Gluon, as ``prefill.prefill_attention``: what FlashAttention-3 does for Hopper.

Two warpgroups take 64 queries each of a block; a third party of one warp brings the tiles they both read
(Shah et al. 2024, "FlashAttention-3", section 3.1). Inside a warpgroup the softmax of key tile j runs beside
the product of tile j - 1's weights and values (section 3.2). A program takes block after block, longest
first, so that the last ones end together.

A step s of a block brings the keys of tile s (s < n) and the values of tile s - 1 (s >= 1) into one place
of a ring, for the n key tiles that the block sees.

Bits: blocks and tiles lie at absolute positions of their row, a score is masked where its absolute position
says so, tile 0 is every query's first, and a masked key has weight 0 and leaves the peak as it is: the bits
of a query depend on its row alone.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ouro_kernels.triton_ops.hopper_products import describe

HEAD_DIMS = (64, 128)
BLOCK_Q = 128
BLOCK_K = 128
STAGES = 3
HALF_Q = 64  # queries of a warpgroup
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread


@gluon.jit
def _block_of(turn, blocks_ptr, HEADS: gl.constexpr):
    """(block, head) of a program's turn: forth and back over the items, which come longest first."""
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, p, programs - 1 - p)
    return blocks_ptr + (item // HEADS) * 5, item % HEADS


@gluon.jit
def _turns(items):
    """How many items this program takes."""
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    turns = items // programs
    p = gl.where(turns % 2 == 0, p, programs - 1 - p)
    return turns + (p < items % programs).to(gl.int32)


@gluon.jit
def _produce(
    queries,
    keys,
    values,
    blocks_ptr,
    items,
    qs,
    ks,
    vs,
    q_arrived,
    q_free,
    arrived,
    free,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Bring queries and tiles as their places in shared memory become free."""
    BYTES: gl.constexpr = keys.block_type.nbytes
    step = 0
    for turn in range(_turns(items)):
        block, head = _block_of(turn, blocks_ptr, HEADS)
        last = gl.load(block + 2)
        packed = gl.load(block + 3)
        place = gl.load(block + 4)
        column = (head // (HEADS // KV_HEADS)) * D
        n = (last + BK - 1) // BK
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        mbarrier.expect(q_arrived, 2 * queries.block_type.nbytes)
        tma.async_copy_global_to_shared(queries, [packed, head * D], q_arrived, qs.index(0))
        tma.async_copy_global_to_shared(queries, [packed + BQ, head * D], q_arrived, qs.index(1))
        for s in range(n + 1):
            at = (step + s) % STAGES
            mbarrier.wait(free.index(at), (((step + s) // STAGES) & 1) ^ 1)
            here = arrived.index(at)
            mbarrier.expect(here, 2 * BYTES, pred=(s >= 1) & (s < n))
            mbarrier.expect(here, BYTES, pred=(s == 0) | (s == n))
            tma.async_copy_global_to_shared(keys, [place + s * BK, column], here, ks.index(at), pred=s < n)
            tma.async_copy_global_to_shared(
                values, [place + (s - 1) * BK, column], here, vs.index(at), pred=s >= 1
            )
        step += n + 1


@gluon.jit
def _soften(score, peak, scale):
    """(peak, peak * scale, weights) with one more score tile."""
    peak = gl.maximum(peak, gl.max(score, 1))
    top = peak * scale
    return peak, top, gl.exp2(gl.fma(score, scale, -top[:, None]))


@gluon.jit
def _sums(weight, BQ: gl.constexpr, BK: gl.constexpr):
    """Sums [BQ, 4] of the weights that one thread holds of a query: summed up over threads at the end."""
    return gl.sum(gl.sum(weight.reshape([BQ, BK // 8, 4, 2]), 3), 1)


@gluon.jit
def _mask(score, tile, position, BK: gl.constexpr, layout: gl.constexpr):
    key = tile + gl.arange(0, BK, gl.SliceLayout(0, layout))
    return gl.where(key[None, :] <= position[:, None], score, -float("inf"))


@gluon.jit
def _step(
    j,
    step,
    q,
    ks,
    vs,
    arrived,
    free,
    position,
    peak,
    top,
    rescale,
    total,
    acc,
    weight,
    scale,
    MASKED: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):
    """Scores of tile j, then the values of tile j - 1 beside the softmax of j. step: that of tile 0."""
    kind: gl.constexpr = ks.dtype
    at = (step + j) % STAGES
    after = step + j + 1
    score = gl.zeros([BQ, BK], gl.float32, s_layout)
    score = warpgroup_mma(q, ks.index(at).permute((1, 0)), score, use_acc=False, is_async=True)
    mbarrier.arrive(free.index((step + j - 1) % STAGES), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
    acc = warpgroup_mma(weight, vs.index(at), acc, is_async=True)
    score = warpgroup_mma_wait(num_outstanding=1, deps=[score])
    if MASKED:
        score = _mask(score, j * BK, position, BK, s_layout)
    old = top
    peak, top, fresh = _soften(score, peak, scale)
    rescale = gl.exp2(old - top)
    sums = _sums(fresh, BQ, BK)
    total = total * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    weight = gl.convert_layout(fresh.to(kind), gl.DotOperandLayout(0, o_layout, 2))
    # waited for here: the assembler would move the next wait over the softmax, but not over this one
    mbarrier.wait(arrived.index(after % STAGES), (after // STAGES) & 1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    return peak, top, rescale, total, acc, weight


@gluon.jit
def _consume(
    blocks_ptr,
    out_ptr,
    scale,
    items,
    qs,
    ks,
    vs,
    q_arrived,
    q_free,
    arrived,
    free,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attention of the queries PART * BQ .. of each block."""
    kind: gl.constexpr = ks.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q = qs.index(PART)
    step = 0
    for turn in range(_turns(items)):
        block, head = _block_of(turn, blocks_ptr, HEADS)
        start = gl.load(block)  # absolute, a multiple of 2 * BQ
        first = gl.load(block + 1)
        last = gl.load(block + 2)  # positions first .. last - 1 of the block are real
        packed = gl.load(block + 3)
        n = (last + BK - 1) // BK
        whole = start // BK  # tiles that all queries of the block see whole
        position = start + PART * BQ + gl.arange(0, BQ, gl.SliceLayout(1, s_layout))
        mbarrier.wait(q_arrived, turn & 1)
        mbarrier.wait(arrived.index(step % STAGES), (step // STAGES) & 1)
        score = gl.zeros([BQ, BK], gl.float32, s_layout)
        score = warpgroup_mma(q, ks.index(step % STAGES).permute((1, 0)), score, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(num_outstanding=0, deps=[score])
        score = _mask(score, 0, position, BK, s_layout)
        peak = gl.full([BQ], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
        peak, top, fresh = _soften(score, peak, scale)
        rescale = gl.full_like(peak, 1.0)
        total = _sums(fresh, BQ, BK)
        weight = gl.convert_layout(fresh.to(kind), gl.DotOperandLayout(0, o_layout, 2))
        acc = gl.zeros([BQ, D], gl.float32, o_layout)
        mbarrier.wait(arrived.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
        for j in range(1, whole):
            peak, top, rescale, total, acc, weight = _step(
                j, step, q, ks, vs, arrived, free, position, peak, top, rescale, total, acc, weight, scale,
                False, BQ, BK, STAGES, s_layout, o_layout,
            )  # fmt: skip
        for j in range(gl.maximum(whole, 1), n):
            peak, top, rescale, total, acc, weight = _step(
                j, step, q, ks, vs, arrived, free, position, peak, top, rescale, total, acc, weight, scale,
                True, BQ, BK, STAGES, s_layout, o_layout,
            )  # fmt: skip
        mbarrier.arrive(q_free, count=1)
        mbarrier.arrive(free.index((step + n - 1) % STAGES), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        acc = warpgroup_mma(weight, vs.index((step + n) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(free.index((step + n) % STAGES), count=1)
        acc = acc / gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, o_layout))[:, None]
        row = PART * BQ + gl.arange(0, BQ, gl.SliceLayout(1, o_layout))
        real = (start + row >= first) & (start + row < last)
        d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
        at = ((packed + row).to(gl.int64) * HEADS + head)[:, None] * D + d[None, :]
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
        step += n + 1


@gluon.jit
def _prefill_kernel(
    queries,
    keys,
    values,
    blocks_ptr,
    num_blocks_ptr,
    out_ptr,
    scale,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    kind: gl.constexpr = keys.dtype
    items = HEADS * gl.load(num_blocks_ptr)
    qs = gl.allocate_shared_memory(kind, [2, BQ, D], queries.layout)
    ks = gl.allocate_shared_memory(kind, [STAGES, BK, D], keys.layout)
    vs = gl.allocate_shared_memory(kind, [STAGES, BK, D], values.layout)
    q_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_arrived, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    blocks_ptr, out_ptr, scale, items, qs, ks, vs, q_arrived, q_free, arrived, free,
                    0, HEADS, D, BQ, BK, STAGES,
                ),
            ),
            (
                _consume,
                (
                    blocks_ptr, out_ptr, scale, items, qs, ks, vs, q_arrived, q_free, arrived, free,
                    1, HEADS, D, BQ, BK, STAGES,
                ),
            ),
            (
                _produce,
                (
                    queries, keys, values, blocks_ptr, items, qs, ks, vs, q_arrived, q_free, arrived, free,
                    HEADS, KV_HEADS, D, BQ, BK, STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


def prefill_attention(
    query: torch.Tensor,
    packed_keys: TensorDescriptor,
    packed_values: TensorDescriptor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    kv_heads: int,
    programs: int,
) -> None:
    """Causal attention of packed positions.

    query, out [M, heads, D], D of HEAD_DIMS; packed_* ``describe`` [capacity, kv_heads * D] in blocks of
    [BLOCK_K, D]; blocks int32 [n, 5] (:class:`~ouro_kernels.triton_ops.prefill.PrefillGroup`) of BLOCK_Q
    queries, of which the first ``num_blocks`` [1] count; ``programs`` at most: as many as the device has SMs.
    """
    rows, heads, head_dim = query.shape
    _prefill_kernel[(min(heads * len(blocks), programs),)](
        describe(query.view(rows, heads * head_dim), [HALF_Q, head_dim]),
        packed_keys,
        packed_values,
        blocks,
        num_blocks,
        out,
        scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        BQ=HALF_Q,
        BK=BLOCK_K,
        STAGES=STAGES,
        CONSUMER=CONSUMER_REGISTERS,
        PRODUCER=PRODUCER_REGISTERS,
        num_warps=4,
    )
