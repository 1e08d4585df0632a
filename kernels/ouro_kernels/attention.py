"""Attention over KV slots at page size 1.

Both kernels read keys and values through slot numbers only, so any layout of the slot table is
the same to them. Keys are walked in tiles of ``TILE`` at absolute positions: tile t holds the
positions ``t * TILE .. t * TILE + TILE - 1`` whoever asks, which is why chunking, prefix hits and
batch mates cannot change a bit.
"""

from __future__ import annotations

import torch

from ouro_kernels.elementwise import exp

TILE = 64
QUERY_BLOCK = 16

# torch computes bf16 products of at most so many multiplications with another kernel, which sums in
# another order.
SMALL_PRODUCT = 4096


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query per lane over that lane's own slots.

    query [L, heads, head_dim]; key_cache, value_cache [num_slots, kv_heads, head_dim];
    slots [L, tiles * TILE] int64, where entries from ``lengths[i]`` on name any slot that the lane
    may read (they are masked); lengths [L] int64, >= 1. Returns [L, heads, head_dim].

    Partial results of all tiles are made at once, then merged in tile order. Softmax is fp32.
    """
    lanes, heads, head_dim = query.shape
    copies = SMALL_PRODUCT // (query.numel() * TILE) + 1
    if copies > 1:  # few lanes of a small model: they must go the way of many
        many = decode_attention(
            query.repeat(copies, 1, 1),
            key_cache,
            value_cache,
            slots.repeat(copies, 1),
            lengths.repeat(copies),
            scale,
        )
        return many[:lanes]
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    tiles = slots.shape[1] // TILE
    batch = lanes * tiles * kv_heads
    # [L, tiles, TILE, kv_heads, D] -> [L * tiles * kv_heads, TILE, D]
    keys = key_cache[slots].view(lanes, tiles, TILE, kv_heads, head_dim).transpose(2, 3)
    values = value_cache[slots].view(lanes, tiles, TILE, kv_heads, head_dim).transpose(2, 3)
    queries = query.view(lanes, 1, kv_heads, group, head_dim).expand(lanes, tiles, kv_heads, group, head_dim)
    scores = torch.bmm(
        queries.reshape(batch, group, head_dim), keys.reshape(batch, TILE, head_dim).transpose(1, 2)
    )
    scores = scores.view(lanes, tiles, kv_heads, group, TILE).float() * scale
    position = torch.arange(tiles * TILE, device=query.device).view(1, tiles, 1, 1, TILE)
    scores = scores.masked_fill(position >= lengths.view(lanes, 1, 1, 1, 1), -torch.inf)

    tile_max = scores.amax(-1)  # [L, tiles, kv_heads, group]
    peak = tile_max.amax(1, keepdim=True)  # finite: position 0 is always visible
    weight = exp(scores - peak.unsqueeze(-1))
    tile_sum = weight.sum(-1)
    partial = torch.bmm(
        weight.view(batch, group, TILE).to(values.dtype), values.reshape(batch, TILE, head_dim)
    ).view(lanes, tiles, kv_heads, group, head_dim)

    total = tile_sum[:, 0]
    output = partial[:, 0].float()
    for tile in range(1, tiles):  # in order: a masked tile adds exact zeros
        total = total + tile_sum[:, tile]
        output = output + partial[:, tile].float()
    return (output / total.unsqueeze(-1)).to(query.dtype).reshape(lanes, heads, head_dim)


def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    start: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of the consecutive positions ``start ..`` of one row.

    query [M, heads, head_dim]; slots [start + M] int64: those of the positions from 0 on. Returns
    [M, heads, head_dim]. Queries are grouped in blocks of 16 at absolute positions, so a query is
    computed in the same block position whichever chunk brings it.
    """
    count, heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    end = start + count
    first = start - start % QUERY_BLOCK
    rows = end - first + (-(end - first) % QUERY_BLOCK)
    blocked = query.new_zeros(rows, heads, head_dim)
    blocked[start - first : end - first] = query
    # [kv_heads * group, rows, D]
    queries = blocked.transpose(0, 1).contiguous()
    positions = torch.arange(first, first + rows, device=query.device).view(1, rows, 1)

    peak = torch.full((heads, rows, 1), -torch.inf, device=query.device)
    total = torch.zeros((heads, rows, 1), device=query.device)
    output = torch.zeros((heads, rows, head_dim), device=query.device)
    for tile_start in range(0, end, TILE):
        tile = slots[tile_start : tile_start + TILE]
        keys = key_cache.new_zeros(TILE, kv_heads, head_dim)
        values = value_cache.new_zeros(TILE, kv_heads, head_dim)
        keys[: len(tile)] = key_cache[tile]
        values[: len(tile)] = value_cache[tile]
        keys = keys.transpose(0, 1).repeat_interleave(group, 0)  # [heads, TILE, D]
        values = values.transpose(0, 1).repeat_interleave(group, 0)
        scores = torch.bmm(queries, keys.transpose(1, 2)).float() * scale
        key_position = torch.arange(tile_start, tile_start + TILE, device=query.device).view(1, 1, TILE)
        scores = scores.masked_fill(key_position > positions, -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        rescale = exp(peak - new_peak)  # exactly 1 where the whole tile is masked
        weight = exp(scores - new_peak)
        total = total * rescale + weight.sum(-1, keepdim=True)
        output = output * rescale + torch.bmm(weight.to(values.dtype), values).float()
        peak = new_peak
    result = (output / total).to(query.dtype).transpose(0, 1)
    return result[start - first : end - first].contiguous()
