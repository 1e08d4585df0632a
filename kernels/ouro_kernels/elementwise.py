"""Transcendental functions whose result does not depend on an element's place.

torch's CPU loops run over whole SIMD vectors and finish the last few elements of a tensor with
scalar code, and the two round ``exp`` and ``log`` differently. Padding to whole vectors keeps
every real element in the vector loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_VECTORS = 128  # a multiple of every SIMD loop's stride, for fp32 and for 16-bit types


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function(x)`` for an elementwise function that keeps the shape."""
    padding = -x.numel() % _VECTORS
    if not padding:
        return function(x.contiguous())
    return function(torch.nn.functional.pad(x.reshape(-1), (0, padding)))[: x.numel()].view(x.shape)


def exp(x: torch.Tensor) -> torch.Tensor:
    return elementwise(torch.exp, x)


def log(x: torch.Tensor) -> torch.Tensor:
    return elementwise(torch.log, x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return elementwise(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    return elementwise(torch.nn.functional.silu, x)
