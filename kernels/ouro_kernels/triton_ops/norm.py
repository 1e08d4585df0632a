"""Row-wise kernels between the products: partial sums, sandwich norms, residual, SwiGLU.

One program per row; every reduction is over one row in one fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ouro_kernels.triton_ops.gemm import pdl_launch


@triton.jit
def _rms(x, weight, H: tl.constexpr, eps, kind: tl.constexpr):
    """RMSNorm of one fp32 row, rounded where the plain model rounds; fp32 again."""
    inverse = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    return ((x * inverse).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)


@triton.jit
def _enter_kernel(
    hidden_ptr, lanes_ptr, count_ptr, weight_ptr, residual_ptr, x_ptr, eps, H: tl.constexpr, BH: tl.constexpr
):
    lane = tl.program_id(0)
    if lane >= tl.load(count_ptr):
        return
    kind = x_ptr.dtype.element_ty
    d = tl.arange(0, BH)
    keep = d < H
    row = tl.load(lanes_ptr + lane).to(tl.int64)
    h = tl.load(hidden_ptr + row * H + d, mask=keep, other=0.0)
    weight = tl.load(weight_ptr + d, mask=keep, other=0.0).to(tl.float32)
    tl.store(residual_ptr + lane * H + d, h, mask=keep)
    tl.store(x_ptr + lane * H + d, _rms(h.to(tl.float32), weight, H, eps, kind).to(kind), mask=keep)


def enter(
    hidden: torch.Tensor,
    lanes: torch.Tensor,
    count: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    x: torch.Tensor,
    eps: float,
) -> None:
    """residual[i] = hidden[lanes[i]] and x[i] = its norm, for i < count. hidden [R, H], others [B, H]."""
    width = hidden.shape[1]
    _enter_kernel[(x.shape[0],)](
        hidden, lanes, count, weight, residual, x, eps, H=width, BH=triton.next_power_of_2(width), num_warps=8
    )


@triton.jit(do_not_specialize=["rows"])
def _sandwich_kernel(
    partial_ptr,
    residual_ptr,
    weight_out_ptr,
    weight_in_ptr,
    x_ptr,
    rows,
    eps,
    SPLIT: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = x_ptr.dtype.element_ty
    d = tl.arange(0, BH)
    keep = d < H
    weight_out = tl.load(weight_out_ptr + d, mask=keep, other=0.0)
    weight_in = tl.load(weight_in_ptr + d, mask=keep, other=0.0)
    if PDL:
        gdc_launch_dependents()  # few programs: let the next product ask for its weights at once
        gdc_wait()
    mixed = tl.zeros((BH,), tl.float32)
    for split in tl.static_range(SPLIT):  # in index order
        part = tl.load(partial_ptr + split * rows * H + row * H + d, mask=keep, other=0.0)
        mixed += part.to(tl.float32)
    mixed = mixed.to(kind).to(tl.float32)
    residual = tl.load(residual_ptr + row * H + d, mask=keep, other=0.0).to(tl.float32)
    h = (residual + _rms(mixed, weight_out.to(tl.float32), H, eps, kind)).to(kind)
    tl.store(residual_ptr + row * H + d, h, mask=keep)
    x = _rms(h.to(tl.float32), weight_in.to(tl.float32), H, eps, kind)
    tl.store(x_ptr + row * H + d, x.to(kind), mask=keep)


def sandwich(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight_out: torch.Tensor,
    weight_in: torch.Tensor,
    x: torch.Tensor,
    eps: float,
    pdl: bool = False,
) -> None:
    """residual += norm(sum of partials) * weight_out; x = norm(residual) * weight_in.

    partial [splits, B, H] (fp32, or the dtype of x with one split); residual, x [B, H].
    """
    splits, rows, width = partial.shape
    _sandwich_kernel[(rows,)](
        partial,
        residual,
        weight_out,
        weight_in,
        x,
        rows,
        eps,
        SPLIT=splits,
        H=width,
        BH=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=8,
        **pdl_launch(pdl),
    )


def sandwich_twin(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight_out: torch.Tensor,
    weight_in: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual, x) after the call."""
    from ouro_kernels.norm import rms_norm

    mixed = partial.float().sum(0).to(residual.dtype)
    residual = residual + rms_norm(mixed, weight_out, eps)
    return residual, rms_norm(residual, weight_in, eps)


@triton.jit
def _rms_kernel(x_ptr, weight_ptr, out_ptr, eps, H: tl.constexpr, BH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    kind = out_ptr.dtype.element_ty
    d = tl.arange(0, BH)
    keep = d < H
    x = tl.load(x_ptr + row * H + d, mask=keep, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + d, _rms(x, weight, H, eps, kind).to(kind), mask=keep)


def rms(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """out = RMSNorm of each row of x [M, H]; twin: ``ouro_kernels.norm.rms_norm``."""
    width = x.shape[1]
    _rms_kernel[(x.shape[0],)](x, weight, out, eps, H=width, BH=triton.next_power_of_2(width), num_warps=8)


@triton.jit
def _silu_multiply_kernel(x_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = f < F
    kind = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * F + f, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + f, mask=keep, other=0.0).to(tl.float32)
    y = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    tl.store(out_ptr + row * F + f, y.to(kind), mask=keep)


def silu_and_multiply(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of each row of x [M, 2 F] (gate, then up): [M, F]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    _silu_multiply_kernel[(rows, triton.cdiv(width, block))](x, out, F=width, BLOCK=block, num_warps=8)
    return out
