"""Weight-streaming matrix products for a few rows: ``x @ weight.T``.

Bits: an output element is one chain of k-steps of 16 in ascending order within its K split, however
many rows, whatever tile; a weight's number of splits is fixed, and the partial sums are written
apart for the consumer to add in index order. So the row count may change the tile, never the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class GemmTile:
    """Launch shape of one product: rows, weight rows and inner elements of a tile. ``swap``: the weight
    is the M operand of the tensor core."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    swap: bool = False


# Programmatic dependent launch: with PDL a kernel may start while the one before it still runs, and
# waits for it before it reads. A product lets its successor start late, when its own loads are through.
# Asking for weights in L2 before the wait, or letting successors start at once, was slower.


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    index_ptr,
    count_ptr,
    weight,
    y_ptr,
    rows,
    N,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    GATHER: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    first = tl.program_id(1) * BM
    rm = first + tl.arange(0, BM)
    keep = rm < rows
    if GATHER:  # rows come from a device-built list, by pointer; none left: return at once
        count = tl.load(count_ptr)
        if first >= count:
            return
        keep = rm < count
        source = tl.load(index_ptr + rm, mask=keep, other=0).to(tl.int64)
    column = tl.program_id(0) * BN
    split = tl.program_id(2)
    span: tl.constexpr = K // SPLIT
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for k in tl.range(split * span, (split + 1) * span, BK, num_stages=STAGES):
        if GATHER:
            a = tl.load(
                x + source[:, None] * K + k + tl.arange(0, BK)[None, :], mask=keep[:, None], other=0.0
            )
        else:
            a = x.load([first, k])
        b = weight.load([column, k])
        if SWAP:
            acc = tl.dot(b, a.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    if PDL:
        gdc_launch_dependents()
    if SWAP:
        acc = acc.T
    rn = column + tl.arange(0, BN)
    out = y_ptr + split * rows * N + rm[:, None] * N + rn[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=keep[:, None] & (rn < N)[None, :])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: GemmTile,
    splits: int = 1,
    index: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out[s] = partial sum s of ``x @ weight.T``.

    x [B, K], or with ``index`` any [*, K] whose rows index[0 .. count) are taken; weight [N, K].
    The weight, and x without an ``index``, are read by TMA: rows start at multiples of 16 bytes;
    out [splits, B, N] (the dtype of x, or fp32). K must be a multiple of splits * tile.block_k. Rows
    at or past ``count`` are not written.
    """
    rows, columns, inner = out.shape[-2], weight.shape[0], weight.shape[1]
    grid = (triton.cdiv(columns, tile.block_n), triton.cdiv(rows, tile.block_m), splits)
    _linear_kernel[grid](
        x if index is not None else TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        index,
        count,
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        out,
        rows,
        columns,
        K=inner,
        SPLIT=splits,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        SWAP=tile.swap,
        GATHER=index is not None,
        STAGES=tile.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=tile.warps,
        **pdl_launch(pdl),
    )


def pdl_launch(pdl: bool) -> dict[str, bool]:
    """Launch options; nothing where it is off (the interpreter does not know the option)."""
    return {"launch_pdl": True} if pdl else {}


def linear_twin(x: torch.Tensor, weight: torch.Tensor, splits: int = 1) -> torch.Tensor:
    """[splits, B, N] fp32 partial sums."""
    parts = zip(x.float().chunk(splits, 1), weight.float().chunk(splits, 1), strict=True)
    return torch.stack([a @ b.T for a, b in parts])


@triton.jit(do_not_specialize=["rows"])
def _gate_up_kernel(
    x,
    weight,
    y_ptr,
    rows,
    F: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    first = tl.program_id(1) * BM
    column = tl.program_id(0) * BN
    gate = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        a = x.load([first, k])
        b = weight.load([column, k])
        c = weight.load([F + column, k])
        if SWAP:
            gate = tl.dot(b, a.T, gate, input_precision=PRECISION)
            up = tl.dot(c, a.T, up, input_precision=PRECISION)
        else:
            gate = tl.dot(a, b.T, gate, input_precision=PRECISION)
            up = tl.dot(a, c.T, up, input_precision=PRECISION)
    if PDL:
        gdc_launch_dependents()
    if SWAP:
        gate = gate.T
        up = up.T
    kind = y_ptr.dtype.element_ty
    g = gate.to(kind).to(tl.float32)  # rounded where the plain model rounds
    u = up.to(kind).to(tl.float32)
    y = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32) * u
    rm = first + tl.arange(0, BM)
    rn = column + tl.arange(0, BN)
    out = y_ptr + rm[:, None] * F + rn[None, :]
    tl.store(out, y.to(kind), mask=(rm < rows)[:, None] & (rn < F)[None, :])


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: GemmTile,
    pdl: bool = False,
) -> None:
    """out [B, F] = silu(x @ gate.T) * (x @ up.T); weight [2 F, K] holds gate, then up."""
    rows, width = out.shape
    grid = (triton.cdiv(width, tile.block_n), triton.cdiv(rows, tile.block_m))
    _gate_up_kernel[grid](
        TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        out,
        rows,
        F=width,
        K=weight.shape[1],
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        SWAP=tile.swap,
        STAGES=tile.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=tile.warps,
        **pdl_launch(pdl),
    )


def gate_up_twin(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, F] in the dtype of x."""
    gate, up = (x.float() @ weight.float().T).to(x.dtype).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
