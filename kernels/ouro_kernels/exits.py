"""The exit gate and the decision to leave the loop.

Formulas: arXiv 2510.25741. With ``lambda_t = sigmoid(w . h_t + b)`` and the survival product
``S_t = prod_{j <= t} (1 - lambda_j)``, the probability to have left by loop m is
``F(m) = 1 - S_m`` for m < T and ``F(T) = 1``. All in fp32: in bf16 values above 0.998 round to 1.
"""

from __future__ import annotations

import torch

from ouro_kernels.elementwise import sigmoid

OURO, OURO_DELAYED, RANDOM_LOOKAHEAD, LOOKAHEAD, TRACE = range(5)


def gate(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``sigmoid(weight . hidden + bias)`` per row: hidden [M, H], weight [H] fp32, bias [] fp32 -> [M] fp32.

    An elementwise product and a row sum, not a matrix-vector product: those are not row-exact.
    """
    return sigmoid((hidden.float() * weight).sum(-1) + bias)


def exit_decision(
    mode: torch.Tensor,
    loops: torch.Tensor,
    hazard: torch.Tensor,
    lookahead: torch.Tensor,
    survival: torch.Tensor,
    pending: torch.Tensor,
    min_loops: torch.Tensor,
    max_loops: torch.Tensor,
    threshold: torch.Tensor,
    traced: torch.Tensor,
    replayed: torch.Tensor,
    total_loops: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which lanes leave after the loop that they have just run.

    All arguments [L]: mode int64 (the constants above); loops int64, run so far, 1..T; hazard fp32,
    this loop's lambda; lookahead fp32, this loop's lookahead value (of whichever head the mode
    uses); survival fp32, S before this loop; pending bool, a trigger of an earlier loop; min_loops,
    max_loops int64; threshold fp32; traced int64, the exit depth that a trace demands; replayed bool,
    the lane leaves at that depth and at no other, whatever its mode and limits.

    Returns (leave bool, survival fp32 after this loop, pending bool after this loop).
    """
    survival = survival * (1.0 - hazard)
    cdf = torch.where(loops >= total_loops, torch.ones_like(survival), 1.0 - survival)
    early = threshold < 1.0
    crossed = early & (cdf >= threshold)
    announced = early & (lookahead >= threshold)

    leave_now = (mode == OURO) & crossed & (loops >= min_loops)
    leave_now |= (mode == TRACE) & (loops >= traced)
    trigger = (mode == OURO_DELAYED) & crossed & (loops >= min_loops)
    trigger |= ((mode == RANDOM_LOOKAHEAD) | (mode == LOOKAHEAD)) & announced & (loops + 1 >= min_loops)
    leave = torch.where(replayed, loops >= traced, leave_now | pending | (loops >= max_loops))
    return leave, survival, trigger & ~leave
