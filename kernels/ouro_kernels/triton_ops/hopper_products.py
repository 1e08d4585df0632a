"""The products of ``gemm`` of a round: weights stream in while the kernel before still runs.

Triton's own loops begin to load after the dependency wait of programmatic dependent launch. These
kernels are in Gluon, Triton's lower language, to ask for their first weight tiles before it: the weights
do not depend on the kernel before. So the memory is busy through the ramps between kernels, the more of a
round the fewer its rows.

Bits: the chain of k-steps is that of ``gemm``, and so are the bits.
"""

from __future__ import annotations

import torch
import triton
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ouro_kernels.triton_ops.gemm import GemmTile, pdl_launch

# A kernel lets its successor start once its own last loads are under way: the successor then asks for its
# weights behind them. Sooner, both would share the memory and the shared memory; later, it would idle.


@gluon.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    y_ptr,
    rows,
    N,
    K: gl.constexpr,
    SPLIT: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    STEPS: gl.constexpr = K // SPLIT // BK
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = x.block_type.nbytes + weight.block_type.nbytes
    xs = gl.allocate_shared_memory(x.dtype, [AHEAD, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(weight.dtype, [AHEAD, BN, BK], weight.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(AHEAD):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    column = gl.program_id(0) * BN
    first = gl.program_id(1) * BM
    split = gl.program_id(2)
    base = split * (K // SPLIT)
    for stage in gl.static_range(AHEAD):
        mbarrier.expect(arrived.index(stage), BYTES)
        tma.async_copy_global_to_shared(
            weight, [column, base + stage * BK], arrived.index(stage), ws.index(stage)
        )
    if PDL:
        gdc_wait()
    for stage in gl.static_range(AHEAD):
        tma.async_copy_global_to_shared(x, [first, base + stage * BK], arrived.index(stage), xs.index(stage))
    if PDL and STEPS == AHEAD:
        gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BM, 16]
    )
    acc = gl.zeros([BN, BM], gl.float32, layout)
    for step in gl.static_range(STEPS):
        mbarrier.wait(arrived.index(step % AHEAD), (step // AHEAD) & 1)
        acc = warpgroup_mma(
            ws.index(step % AHEAD), xs.index(step % AHEAD).permute((1, 0)), acc, is_async=True
        )
        if step >= 1 and step - 1 + AHEAD < STEPS:  # the step before is multiplied: its place is free
            k = base + (step - 1 + AHEAD) * BK
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            mbarrier.expect(arrived.index((step - 1) % AHEAD), BYTES)
            tma.async_copy_global_to_shared(
                weight, [column, k], arrived.index((step - 1) % AHEAD), ws.index((step - 1) % AHEAD)
            )
            tma.async_copy_global_to_shared(
                x, [first, k], arrived.index((step - 1) % AHEAD), xs.index((step - 1) % AHEAD)
            )
            if PDL and step + AHEAD == STEPS:
                gdc_launch_dependents()
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    store: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), store)
    rn = column + gl.arange(0, BN, gl.SliceLayout(1, store))
    rm = first + gl.arange(0, BM, gl.SliceLayout(0, store))
    at = y_ptr + split * rows * N + rm[None, :] * N + rn[:, None]
    gl.store(at, out, mask=(rm < rows)[None, :] & (rn < N)[:, None])


@gluon.jit(do_not_specialize=["rows"])
def _gate_up_kernel(
    x,
    weight,
    y_ptr,
    rows,
    F: gl.constexpr,
    K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    STEPS: gl.constexpr = K // BK
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = x.block_type.nbytes + 2 * weight.block_type.nbytes
    xs = gl.allocate_shared_memory(x.dtype, [AHEAD, BM, BK], x.layout)
    gs = gl.allocate_shared_memory(weight.dtype, [AHEAD, BN, BK], weight.layout)
    us = gl.allocate_shared_memory(weight.dtype, [AHEAD, BN, BK], weight.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(AHEAD):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    column = gl.program_id(0) * BN
    first = gl.program_id(1) * BM
    for stage in gl.static_range(AHEAD):
        mbarrier.expect(arrived.index(stage), BYTES)
        tma.async_copy_global_to_shared(weight, [column, stage * BK], arrived.index(stage), gs.index(stage))
        tma.async_copy_global_to_shared(
            weight, [F + column, stage * BK], arrived.index(stage), us.index(stage)
        )
    if PDL:
        gdc_wait()
    for stage in gl.static_range(AHEAD):
        tma.async_copy_global_to_shared(x, [first, stage * BK], arrived.index(stage), xs.index(stage))
    if PDL and STEPS == AHEAD:
        gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BM, 16]
    )
    gate = gl.zeros([BN, BM], gl.float32, layout)
    up = gl.zeros([BN, BM], gl.float32, layout)
    for step in gl.static_range(STEPS):
        mbarrier.wait(arrived.index(step % AHEAD), (step // AHEAD) & 1)
        rows_first = xs.index(step % AHEAD).permute((1, 0))
        gate = warpgroup_mma(gs.index(step % AHEAD), rows_first, gate, is_async=True)
        up = warpgroup_mma(us.index(step % AHEAD), rows_first, up, is_async=True)
        if step >= 1 and step - 1 + AHEAD < STEPS:  # the step before is multiplied: its place is free
            k = (step - 1 + AHEAD) * BK
            gate, up = warpgroup_mma_wait(num_outstanding=2, deps=[gate, up])
            mbarrier.expect(arrived.index((step - 1) % AHEAD), BYTES)
            tma.async_copy_global_to_shared(
                weight, [column, k], arrived.index((step - 1) % AHEAD), gs.index((step - 1) % AHEAD)
            )
            tma.async_copy_global_to_shared(
                weight, [F + column, k], arrived.index((step - 1) % AHEAD), us.index((step - 1) % AHEAD)
            )
            tma.async_copy_global_to_shared(
                x, [first, k], arrived.index((step - 1) % AHEAD), xs.index((step - 1) % AHEAD)
            )
            if PDL and step + AHEAD == STEPS:
                gdc_launch_dependents()
    gate, up = warpgroup_mma_wait(num_outstanding=0, deps=[gate, up])
    kind: gl.constexpr = y_ptr.dtype.element_ty
    g = gate.to(kind).to(gl.float32)  # rounded where the plain model rounds
    u = up.to(kind).to(gl.float32)
    y = (g / (1.0 + gl.exp(-g))).to(kind).to(gl.float32) * u
    store: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(y.to(kind), store)
    rn = column + gl.arange(0, BN, gl.SliceLayout(1, store))
    rm = first + gl.arange(0, BM, gl.SliceLayout(0, store))
    gl.store(y_ptr + rm[None, :] * F + rn[:, None], out, mask=(rm < rows)[None, :] & (rn < F)[:, None])


def describe(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """x [rows, columns], bf16 or fp16, as the kernels of this folder's Gluon files read it."""
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, kind))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: GemmTile,
    splits: int = 1,
    pdl: bool = False,
) -> None:
    """As ``gemm.linear`` without an index, bit for bit; the weight is always the M operand.

    x [B, K], weight [N, K], out [splits, B, N] (the dtype of x, or fp32); ``tile.block_n`` is 64 or more.
    """
    rows, columns, inner = out.shape[-2], weight.shape[0], weight.shape[1]
    grid = (triton.cdiv(columns, tile.block_n), triton.cdiv(rows, tile.block_m), splits)
    _linear_kernel[grid](
        describe(x, [tile.block_m, tile.block_k]),
        describe(weight, [tile.block_n, tile.block_k]),
        out,
        rows,
        columns,
        K=inner,
        SPLIT=splits,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        **pdl_launch(pdl),
    )


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: GemmTile, pdl: bool = False
) -> None:
    """As ``gemm.gate_up``, bit for bit: out [B, F] = silu(x @ gate.T) * (x @ up.T)."""
    rows, width = out.shape
    grid = (triton.cdiv(width, tile.block_n), triton.cdiv(rows, tile.block_m))
    _gate_up_kernel[grid](
        describe(x, [tile.block_m, tile.block_k]),
        describe(weight, [tile.block_n, tile.block_k]),
        out,
        rows,
        F=width,
        K=weight.shape[1],
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        **pdl_launch(pdl),
    )
