"""Matrix products with row-exact results."""

from __future__ import annotations

import torch

ROW_BLOCK = 16


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` with rows that do not depend on their neighbours.

    x [M, K], weight [N, K], same dtype; returns [M, N].
    """
    rows = x.shape[0]
    padding = -rows % ROW_BLOCK
    if not padding:
        return torch.nn.functional.linear(x, weight)
    padded = x.new_zeros(rows + padding, x.shape[1])
    padded[:rows] = x
    return torch.nn.functional.linear(padded, weight)[:rows]
