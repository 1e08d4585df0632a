"""The gate and up products of a prefill chunk with SwiGLU, in Gluon for compute capability 9.

A tile of 128 rows is multiplied by the same columns of both weights. Two warpgroups take 64 rows each, a
third party of one warp brings the operands; a program takes tile after tile. SwiGLU works on the sums in
registers, so that the products themselves, the largest tensor of a chunk, never reach the memory.

Bits: every sum over K runs in one order whatever the number of rows.
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

from ouro_kernels.triton_ops.hopper_products import describe

ROWS = 64  # of a warpgroup
COLUMNS = 128  # of a weight tile
BLOCK_K = 64
STAGES = 4
GROUP = 32  # row tiles that share their weight tiles in L2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(row tile, column tile): column by column inside groups of GROUP row tiles."""
    width = GROUP * column_tiles
    first = tile // width * GROUP
    size = gl.minimum(row_tiles - first, GROUP)
    inside = tile % width
    return first + inside % size, inside // size


@gluon.jit
def _produce(
    x,
    weight,
    row_tiles,
    column_tiles,
    xs,
    gates,
    ups,
    arrived,
    free,
    F: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Bring operands as their places in shared memory become free."""
    M: gl.constexpr = x.block_type.shape[0]
    N: gl.constexpr = weight.block_type.shape[0]
    BK: gl.constexpr = weight.block_type.shape[1]
    BYTES: gl.constexpr = 2 * x.block_type.nbytes + 2 * weight.block_type.nbytes
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        m, n = _place(tile, row_tiles, column_tiles, GROUP)
        for k in range(K // BK):
            at = step % STAGES
            mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
            here = arrived.index(at)
            mbarrier.expect(here, BYTES)
            tma.async_copy_global_to_shared(x, [m * 2 * M, k * BK], here, xs.index(at * 2))
            tma.async_copy_global_to_shared(x, [m * 2 * M + M, k * BK], here, xs.index(at * 2 + 1))
            tma.async_copy_global_to_shared(weight, [n * N, k * BK], here, gates.index(at))
            tma.async_copy_global_to_shared(weight, [F + n * N, k * BK], here, ups.index(at))
            step += 1


@gluon.jit
def _multiply(
    step,
    xs,
    gates,
    ups,
    arrived,
    free,
    PART: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    layout: gl.constexpr,
):
    """Both products of a tile, fp32; step: that of its first operands."""
    M: gl.constexpr = xs.shape[1]
    N: gl.constexpr = gates.shape[1]
    at = step % STAGES
    mbarrier.wait(arrived.index(at), (step // STAGES) & 1)
    rows = xs.index(at * 2 + PART)
    gate = gl.zeros([M, N], gl.float32, layout)
    up = gl.zeros([M, N], gl.float32, layout)
    gate = warpgroup_mma(rows, gates.index(at).permute((1, 0)), gate, use_acc=False, is_async=True)
    up = warpgroup_mma(rows, ups.index(at).permute((1, 0)), up, use_acc=False, is_async=True)
    gate, up = warpgroup_mma_wait(num_outstanding=2, deps=[gate, up])
    for k in range(1, STEPS):
        at = (step + k) % STAGES
        mbarrier.wait(arrived.index(at), ((step + k) // STAGES) & 1)
        rows = xs.index(at * 2 + PART)
        gate = warpgroup_mma(rows, gates.index(at).permute((1, 0)), gate, is_async=True)
        up = warpgroup_mma(rows, ups.index(at).permute((1, 0)), up, is_async=True)
        gate, up = warpgroup_mma_wait(num_outstanding=2, deps=[gate, up])
        mbarrier.arrive(free.index((step + k - 1) % STAGES), count=1)
    gate, up = warpgroup_mma_wait(num_outstanding=0, deps=[gate, up])
    mbarrier.arrive(free.index((step + STEPS - 1) % STAGES), count=1)
    return gate, up


@gluon.jit
def _allocate(x, weight, STAGES: gl.constexpr):
    """(tiles of rows, of both weights, barriers: operands arrived, their places are free)."""
    M: gl.constexpr = x.block_type.shape[0]
    N: gl.constexpr = weight.block_type.shape[0]
    BK: gl.constexpr = weight.block_type.shape[1]
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, M, BK], x.layout)
    gates = gl.allocate_shared_memory(weight.dtype, [STAGES, N, BK], weight.layout)
    ups = gl.allocate_shared_memory(weight.dtype, [STAGES, N, BK], weight.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    return xs, gates, ups, arrived, free


@gluon.jit
def _gate_up(
    y,
    row_tiles,
    column_tiles,
    xs,
    gates,
    ups,
    ys,
    arrived,
    free,
    PART: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    kind: gl.constexpr = xs.dtype
    M: gl.constexpr = xs.shape[1]
    N: gl.constexpr = gates.shape[1]
    STEPS: gl.constexpr = K // xs.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    out = ys.index(PART)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        m, n = _place(tile, row_tiles, column_tiles, GROUP)
        gate, up = _multiply(step, xs, gates, ups, arrived, free, PART, STEPS, STAGES, layout)
        step += STEPS
        g = gate.to(kind).to(gl.float32)  # rounded where the plain model rounds
        u = up.to(kind).to(gl.float32)
        tma.store_wait(0)
        out.store(((g / (1.0 + gl.exp(-g))).to(kind).to(gl.float32) * u).to(kind))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [(m * 2 + PART) * M, n * N], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_tiles"])
def _gate_up_kernel(
    x,
    weight,
    y,
    row_tiles,
    column_tiles,
    F: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    M: gl.constexpr = x.block_type.shape[0]
    N: gl.constexpr = weight.block_type.shape[0]
    ys = gl.allocate_shared_memory(y.dtype, [2, M, N], y.layout)
    xs, gates, ups, arrived, free = _allocate(x, weight, STAGES)
    gl.warp_specialize(
        [
            (_gate_up, (y, row_tiles, column_tiles, xs, gates, ups, ys, arrived, free, 0, K, STAGES, GROUP)),
            (_gate_up, (y, row_tiles, column_tiles, xs, gates, ups, ys, arrived, free, 1, K, STAGES, GROUP)),
            (
                _produce,
                (x, weight, row_tiles, column_tiles, xs, gates, ups, arrived, free, F, K, STAGES, GROUP),
            ),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


def fits(hidden: int, intermediate: int) -> bool:
    """Whether the kernel takes a model of these sizes."""
    return hidden % BLOCK_K == 0 and intermediate % 8 == 0


def gate_up(x: torch.Tensor, weight: torch.Tensor, programs: int) -> torch.Tensor:
    """[M, F] = silu(x @ gate.T) * (x @ up.T), each product rounded first.

    x [M, K], weight [2 F, K] (gate, then up) of one 16-bit dtype; K a multiple of BLOCK_K, F of 8;
    ``programs`` at most: as many as the device has SMs.
    """
    rows, inner = x.shape
    width = weight.shape[0] // 2
    out = x.new_empty(rows, width)
    row_tiles, column_tiles = -(-rows // (2 * ROWS)), -(-width // COLUMNS)
    _gate_up_kernel[(min(programs, row_tiles * column_tiles),)](
        describe(x, [ROWS, BLOCK_K]),
        describe(weight, [COLUMNS, BLOCK_K]),
        describe(out, [ROWS, COLUMNS]),
        row_tiles,
        column_tiles,
        F=width,
        K=inner,
        STAGES=STAGES,
        GROUP=GROUP,
        CONSUMER=CONSUMER_REGISTERS,
        PRODUCER=PRODUCER_REGISTERS,
        num_warps=4,
    )
    return out
