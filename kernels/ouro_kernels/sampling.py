"""From logits to a token: penalties, filters, a counter-based sampler, log-probabilities.

Every function works on rows independently. The random numbers of a row depend on its seed and
output index alone, never on the batch (Gumbel-max with a 64-bit mixing function as the counter
generator), so a seed gives the same tokens in any company.
"""

from __future__ import annotations

import torch

from ouro_kernels.elementwise import exp, log

_MASK63 = (1 << 63) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch stores."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (unsigned) shift of int64."""
    return (x >> bits) & (_MASK63 >> (bits - 1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014) on int64 bit patterns."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: torch.Tensor, counters: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` numbers in (0, 1) per row from seeds [M] int64 and counters [M] int64; [M, count] fp32."""
    state = _mix(_mix(seeds) + counters * _GOLDEN)
    ids = torch.arange(1, count + 1, device=seeds.device)
    bits = _shift_right(_mix(state.unsqueeze(1) + ids * _GOLDEN), 41)  # 23 bits: the sum below is exact
    return (bits.float() + 0.5) * (1.0 / (1 << 23))


def apply_penalties(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Logits [M, V] fp32 after penalties, in SGLang's order: additive first, then scaling.

    output_counts [M, V] int32: how often each id was generated; prompt_seen [M, V] bool: whether it
    stands in the prompt (it counts for repetition alone). frequency, presence, repetition [M] fp32.
    """
    generated = output_counts > 0
    logits = logits - frequency.unsqueeze(1) * output_counts - presence.unsqueeze(1) * generated
    scale = torch.where(generated | prompt_seen, repetition.unsqueeze(1), 1.0)
    return torch.where(logits < 0, logits * scale, logits / scale)


def apply_mask(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-inf where the bit of an id is 0: logits [M, V] fp32, mask [M, ceil(V / 32)] int32."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = (mask[:, ids // 32] >> (ids % 32)) & 1
    return logits.masked_fill(bits == 0, -torch.inf)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Row-exact log-softmax of [M, V] fp32."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - log(exp(shifted).sum(-1, keepdim=True))


def filter_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Set to -inf what top-k, top-p and min-p exclude. All three look at the same full distribution.

    logits [M, V] fp32, already divided by temperature; top_k [M] int64 (0: off), top_p, min_p [M]
    fp32. Order within a row: value descending, id ascending; a token stays while the probability
    mass in front of it does not exceed top_p, so the first always stays.
    """
    probabilities = exp(log_softmax(logits))
    ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    mass_before = torch.cumsum(ordered, -1) - ordered
    rank = torch.arange(logits.shape[1], device=logits.device)
    drop = (mass_before > top_p.unsqueeze(1)) | (ordered < ordered[:, :1] * min_p.unsqueeze(1))
    drop |= (top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1))
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter_(1, ids, drop), -torch.inf)


def sample(logits: torch.Tensor, seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Draw one id per row from softmax(logits [M, V] fp32): the argmax of logits plus Gumbel noise.

    Ties go to the lowest id. Returns [M] int64.
    """
    noise = -log(-log(uniform(seeds, counters, logits.shape[1])))
    return torch.argmax(logits + noise, dim=-1)
