"""Storage for keys and values."""

from __future__ import annotations

import torch

from ouro_sgl.config import ServerArgs
from ouro_sgl.models.config import OuroConfig


class KVPool:
    """K and V of every slot: ``keys[layer]`` and ``values[layer]`` are [num_slots, kv_heads, head_dim].

    With ``poison`` the pool holds NaN wherever nothing was written since the slot was handed out,
    so a read of a slot that its reader did not write turns up as non-finite logits.
    """

    def __init__(
        self,
        config: OuroConfig,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        poison: bool = False,
    ) -> None:
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.num_slots = num_slots
        self.poison = poison
        if poison:
            self.keys.fill_(torch.nan)
            self.values.fill_(torch.nan)

    def handed_out(self, slots: list[int]) -> None:
        """Called with the slots of every segment and grant; a no-op unless the pool is poisoned."""
        if self.poison:
            index = torch.tensor(slots)
            if self.keys.device.type == "cuda":  # the host must not wait for launched rounds here either
                index = index.pin_memory().to(self.keys.device, non_blocking=True)
            self.keys.index_fill_(1, index, torch.nan)
            self.values.index_fill_(1, index, torch.nan)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [M, kv_heads, head_dim] of one layer at slots [M] int64 (distinct)."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


def requested_slots(args: ServerArgs, config: OuroConfig, slot_bytes: int) -> int | None:
    """Slots that the settings ask for; None: as many as fit."""
    if args.num_slots is not None:
        return args.num_slots
    if args.max_total_tokens is not None:
        return args.max_total_tokens * config.total_loops
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes // slot_bytes
    return None
