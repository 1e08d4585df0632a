"""Logits of the exited rows to tokens and log-probabilities, by each row's own parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from ouro_kernels import sampling

from ouro_sgl.messages import TopLogprobs
from ouro_sgl.worker.rows import Rows


@dataclass(frozen=True)
class LogprobWish:
    """The log-probabilities that a row wants beside its sampled token's own."""

    top: int
    ids: tuple[int, ...]


@dataclass
class Sampled:
    """token_ids [M] int64; finite [M] bool: False means that the row's logits were unusable and its
    token id is void. Log-probabilities by index into the batch."""

    token_ids: torch.Tensor
    finite: torch.Tensor
    logprobs: dict[int, float] = field(default_factory=dict)
    tops: dict[int, TopLogprobs] = field(default_factory=dict)


def top_logprobs(values: torch.Tensor, top: int, ids: tuple[int, ...]) -> TopLogprobs:
    """From one row of log-probabilities [V]: the ``top`` best (of equals the lowest id), and ``ids``'."""
    best, best_ids = torch.sort(values, descending=True, stable=True)
    return TopLogprobs(
        top_values=best[:top].tolist(),
        top_ids=best_ids[:top].tolist(),
        id_values=values[list(ids)].tolist() if ids else [],
    )


class Sampler:
    """Each stage touches only the rows that use it, so it costs nothing where nobody does."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def run(self, logits: torch.Tensor, ready: torch.Tensor, wishes: dict[int, LogprobWish]) -> Sampled:
        """logits [M, V] fp32 of the rows ``ready`` [M] int64 (ascending); consumed."""
        rows = self._rows
        finite = torch.isfinite(logits).all(-1)
        if not bool(finite.all()):
            logits = torch.where(finite.unsqueeze(1), logits, 0.0)
        output_index = rows.position[ready] - rows.prompt_length[ready] + 1
        logits = self._processed(logits, ready, output_index)

        temperature = rows.temperature[ready]
        greedy = temperature == 0.0
        logits = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
        token_ids = torch.argmax(logits, -1)
        drawn = (~greedy).nonzero().squeeze(1)
        if len(drawn):
            token_ids[drawn] = self._draw(logits[drawn], ready[drawn], output_index[drawn])

        sampled = Sampled(token_ids, finite)
        wanted = [(index, wishes[row]) for index, row in enumerate(ready.tolist()) if row in wishes]
        if wanted:
            indices = [index for index, _ in wanted]
            values = sampling.log_softmax(logits[indices])
            chosen = values.gather(1, token_ids[indices].unsqueeze(1)).squeeze(1).tolist()
            for place, (index, wish) in enumerate(wanted):
                sampled.logprobs[index] = chosen[place]
                if wish.top or wish.ids:
                    sampled.tops[index] = top_logprobs(values[place], wish.top, wish.ids)
        return sampled

    def _processed(
        self, logits: torch.Tensor, ready: torch.Tensor, output_index: torch.Tensor
    ) -> torch.Tensor:
        """Penalties, then the hold on end ids, then the grammar's mask, then bias: SGLang's order."""
        rows = self._rows
        penalised = rows.penalised[ready].nonzero().squeeze(1)
        if len(penalised):
            at = ready[penalised]
            logits[penalised] = sampling.apply_penalties(
                logits[penalised],
                rows.output_counts[at],
                rows.prompt_seen[at],
                rows.frequency[at],
                rows.presence[at],
                rows.repetition[at],
            )
        held = (output_index < rows.min_new_tokens[ready]).nonzero().squeeze(1)
        if len(held):
            logits[held] = logits[held].masked_fill(rows.is_end[ready[held]], -torch.inf)
        constrained = rows.constrained[ready].nonzero().squeeze(1)
        if len(constrained):
            logits[constrained] = sampling.apply_mask(logits[constrained], rows.mask[ready[constrained]])
        biased = rows.biased[ready].nonzero().squeeze(1)
        if len(biased):
            logits[biased] += rows.bias[ready[biased]]
        return logits

    def _draw(self, logits: torch.Tensor, at: torch.Tensor, output_index: torch.Tensor) -> torch.Tensor:
        rows = self._rows
        top_k, top_p, min_p = rows.top_k[at], rows.top_p[at], rows.min_p[at]
        filtered = ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)).nonzero().squeeze(1)
        if len(filtered):
            logits[filtered] = sampling.filter_logits(
                logits[filtered], top_k[filtered], top_p[filtered], min_p[filtered]
            )
        return sampling.sample(logits, rows.seed[at], output_index)
