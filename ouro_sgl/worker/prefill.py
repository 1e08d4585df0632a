"""One prefill chunk: packed prompt segments of several rows through all T loops.

Touches only slots and table columns of PREFILL rows, which no decode round reads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from ouro_kernels.sampling import log_softmax

from ouro_sgl.messages import Chunk, ChunkLogprobs, Segment
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.worker.attention import AttentionBackend
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish, top_logprobs


@dataclass(frozen=True)
class Prompt:
    """The host's knowledge of an admitted row; ``token_ids`` [P] int64."""

    row: int
    epoch: int
    token_ids: torch.Tensor
    max_new_tokens: int
    logprob_start: int | None
    logprob_wish: LogprobWish
    exit_lambdas: bool = False  # the exit gate's values at the last token are wanted


@dataclass
class ChunkResult:
    """For rows whose prompt is complete: ``final_hidden[row]`` is h_T [H] of its last token,
    ``lambdas[row]`` [T] fp32 the exit gate's values there, if they are wanted."""

    chunk_id: int
    final_hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    logprobs: list[ChunkLogprobs] = field(default_factory=list)
    lambdas: dict[int, torch.Tensor] = field(default_factory=dict)


def run_chunk(
    chunk: Chunk, prompts: dict[int, Prompt], model: OuroModel, rows: Rows, attention: AttentionBackend
) -> ChunkResult:
    """Compute and store K/V of every loop for the chunk's positions. ``prompts`` by row."""
    pieces = [(segment, prompts[segment.row]) for segment in chunk.segments]
    device = rows.device
    token_ids = torch.cat([prompt.token_ids[piece.start : piece.end] for piece, prompt in pieces])
    positions = torch.cat([torch.arange(piece.start, piece.end, device=device) for piece, _ in pieces])
    ends = list(itertools.accumulate(piece.end - piece.start for piece, _ in pieces))
    last_tokens = {
        piece.row: end - 1
        for (piece, prompt), end in zip(pieces, ends, strict=True)
        if prompt.exit_lambdas and piece.end == len(prompt.token_ids)
    }
    result = ChunkResult(chunk.chunk_id)
    result.lambdas = {row: torch.zeros(rows.total_loops, device=device) for row in last_tokens}
    hidden = model.prelude(token_ids)
    for depth in range(rows.total_loops):
        attention.plan_prefill(
            [(rows.slot_table[depth, piece.row, : piece.end].long(), piece.start) for piece, _ in pieces]
        )
        hidden = model.core(hidden, positions, attention.prefill)
        for row, at in last_tokens.items():
            result.lambdas[row][depth] = model.hazard(hidden[at : at + 1])[0]

    for (piece, prompt), states in zip(
        pieces, hidden.split([piece.end - piece.start for piece, _ in pieces]), strict=True
    ):
        if piece.end == len(prompt.token_ids):
            result.final_hidden[piece.row] = states[-1]
        values = _prompt_logprobs(piece, prompt, states, model)
        if values is not None:
            result.logprobs.append(values)
    return result


def _prompt_logprobs(
    piece: Segment, prompt: Prompt, states: torch.Tensor, model: OuroModel
) -> ChunkLogprobs | None:
    """Values of the prompt tokens that this segment's states [n, H] predict."""
    if prompt.logprob_start is None:
        return None
    first = max(prompt.logprob_start, piece.start + 1)
    last = min(piece.end, len(prompt.token_ids) - 1)
    if first > last:
        return None
    logits = model.coda(states[first - 1 - piece.start : last - piece.start])
    values = log_softmax(logits)
    targets = prompt.token_ids[first : last + 1]
    wish = prompt.logprob_wish
    return ChunkLogprobs(
        row=piece.row,
        epoch=piece.epoch,
        start=first,
        values=values.gather(1, targets.unsqueeze(1)).squeeze(1).tolist(),
        tops=[top_logprobs(row, wish.top, wish.ids) for row in values] if wish.top or wish.ids else [],
    )
