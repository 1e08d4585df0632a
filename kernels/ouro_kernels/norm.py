"""RMSNorm."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of x [M, H] to unit mean square, times weight [H]; the dtype of x.

    The mean square and its root are fp32; the row is cast back before the weight is applied
    (Ouro's published code).
    """
    wide = x.float()
    inverse = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (wide * inverse).to(x.dtype) * weight
