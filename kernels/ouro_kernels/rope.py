"""Rotary positions, split-half form, over the whole head dimension."""

from __future__ import annotations

import torch


def rope_table(
    max_position: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_position, head_dim / 2], from fp32 angles, cast to dtype."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    inverse_frequency = 1.0 / (theta**exponent)
    angle = torch.outer(torch.arange(max_position, dtype=torch.float32, device=device), inverse_frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [M, heads, head_dim]; cos and sin [M, head_dim / 2] are those of each row's position."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
