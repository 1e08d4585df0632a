"""One round in plain torch: the state machine that every device runs.

    work list -> core -> gate and exit decision -> coda over the exited rows -> state update

The steps are those of one captured graph on a GPU; here tensors are sized by what is live. A round
never looks at a plan and never waits for one: a row without granted slots stalls, all others run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from ouro_kernels.exits import OURO, OURO_DELAYED, exit_decision, gate

from ouro_sgl.messages import ExitMode, FinishReason, TopLogprobs
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import Head
from ouro_sgl.worker.attention import AttentionBackend, padded_length
from ouro_sgl.worker.rows import Rows, RowState
from ouro_sgl.worker.sampler import LogprobWish, Sampled, Sampler


@dataclass
class RoundBlock:
    """What one round did. Event columns are parallel; one event per token that left the coda."""

    lanes: int = 0
    exits: int = 0
    rows: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)
    tops: dict[int, TopLogprobs] = field(default_factory=dict)
    exit_lambdas: dict[int, list[float]] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nothing could run: every row is free, done, in prefill, stalled or without its mask."""
        return not self.lanes and not self.exits


class RoundRunner:
    """Runs rounds over ``rows``. ``heads`` are the lookahead heads by exit mode."""

    def __init__(
        self,
        model: OuroModel,
        rows: Rows,
        attention: AttentionBackend,
        heads: dict[ExitMode, Head],
        min_coda_batch_size: int,
    ) -> None:
        self._model = model
        self._rows = rows
        self._attention = attention
        self._heads = heads
        self._min_coda_batch_size = min_coda_batch_size
        self._sampler = Sampler(rows)

    def run(self, wishes: dict[int, LogprobWish]) -> RoundBlock:
        """One round. ``wishes``: which rows want log-probabilities, and of what."""
        block = RoundBlock()
        lanes = self._live_lanes()
        if len(lanes):
            self._core(lanes)
            block.lanes = len(lanes)
        ready = self._coda_rows(core_ran=bool(len(lanes)))
        if len(ready):
            sampled = self._sampler.run(self._model.coda(self._rows.hidden[ready]), ready, wishes)
            replayed = self._force(ready, sampled)
            self._record(block, ready, sampled, replayed)
            self._advance(ready, sampled, replayed)
        return block

    def _live_lanes(self) -> torch.Tensor:
        """Rows that run the core now, ascending; rows at an ungranted position stall."""
        rows = self._rows
        live = (rows.state == RowState.LIVE) | (rows.state == RowState.STALLED)
        runs = live & (rows.position < rows.granted_until)
        rows.state[runs] = int(RowState.LIVE)
        rows.state[live & ~runs] = int(RowState.STALLED)
        return runs.nonzero().squeeze(1)

    def _core(self, lanes: torch.Tensor) -> None:
        """Run every lane at its own depth, then let those that may leave wait for the coda."""
        rows = self._rows
        position, depth = rows.position[lanes], rows.depth[lanes]
        longest = padded_length(int(position.max()) + 1)
        table = rows.slot_table[:, :, :longest][depth, lanes].long()
        self._attention.plan_decode(table, position + 1)
        hidden = self._model.core(rows.hidden[lanes], position, self._attention.decode)
        loops = depth + 1
        leave, survival, pending = self._decide(lanes, hidden, loops)
        rows.hidden[lanes] = hidden
        rows.depth[lanes] = loops
        rows.survival[lanes] = survival
        rows.pending[lanes] = pending.long()
        exited = lanes[leave]
        if len(exited):
            rows.state[exited] = int(RowState.CODA)
            rows.coda_wait[exited] = 0
            self._alias_deeper(exited, loops[leave], position[leave])

    def _decide(
        self, lanes: torch.Tensor, hidden: torch.Tensor, loops: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, total = self._rows, self._rows.total_loops
        mode = rows.exit_mode[lanes]
        gated = (mode == OURO) | (mode == OURO_DELAYED)
        reports = rows.reports_lambdas[lanes] != 0
        zeros = torch.zeros(len(lanes), device=hidden.device)
        hazard = zeros
        if bool((gated | reports).any()):
            value = self._model.hazard(hidden)
            hazard = torch.where(gated, value, zeros)
            rows.lambdas[lanes[reports], loops[reports] - 1] = value[reports]
        lookahead = zeros
        for head_mode, (weight, bias) in self._heads.items():
            uses = mode == int(head_mode)
            if bool(uses.any()):
                lookahead = torch.where(uses, gate(hidden, weight, bias), lookahead)
        return exit_decision(
            mode,
            loops,
            hazard,
            lookahead,
            rows.survival[lanes],
            rows.pending[lanes] != 0,
            rows.min_loops[lanes],
            rows.max_loops[lanes],
            rows.exit_threshold[lanes],
            rows.trace[lanes, rows.position[lanes]].long(),
            rows.replayed(lanes),
            total,
        )

    def _alias_deeper(self, exited: torch.Tensor, loops: torch.Tensor, position: torch.Tensor) -> None:
        """Depths that the token did not run read the slot of its exit depth from now on."""
        table = self._rows.slot_table
        last = table[loops - 1, exited, position]
        for depth in range(1, self._rows.total_loops):
            deeper = loops <= depth
            table[depth, exited[deeper], position[deeper]] = last[deeper]

    def _coda_rows(self, *, core_ran: bool) -> torch.Tensor:
        """Rows whose logits are made now: all that wait, once they are enough or must not wait on.

        A constrained row is not among them until the mask of its position has come; a replayed
        position needs none.
        """
        rows = self._rows
        masked = (rows.constrained == 0) | (rows.mask_position == rows.position)
        masked |= rows.position < rows.replay_until
        ready = ((rows.state == RowState.CODA) & masked).nonzero().squeeze(1)
        if not len(ready) or len(ready) >= self._min_coda_batch_size or not core_ran:
            return ready
        rows.coda_wait[ready] += 1
        if int(rows.coda_wait[ready].max()) >= rows.total_loops:
            return ready
        return ready[:0]

    def _force(self, ready: torch.Tensor, sampled: Sampled) -> torch.Tensor:
        """Put known tokens in the place of sampled ones. Returns which rows are replayed, [M] bool."""
        rows = self._rows
        replayed = rows.replayed(ready)
        known = rows.forced[ready, rows.position[ready]].long()
        sampled.token_ids = torch.where(replayed, known, sampled.token_ids)
        return replayed

    def _record(
        self, block: RoundBlock, ready: torch.Tensor, sampled: Sampled, replayed: torch.Tensor
    ) -> None:
        rows = self._rows
        block.exits = len(ready)
        block.rows = ready.tolist()
        block.epochs = rows.epoch[ready].tolist()
        block.positions = rows.position[ready].tolist()
        block.exit_depths = rows.depth[ready].tolist()
        block.token_ids = sampled.token_ids.tolist()
        block.logprobs = sampled.logprobs
        block.tops = sampled.tops
        for index in rows.reports_lambdas[ready].nonzero().squeeze(1).tolist():
            block.exit_lambdas[index] = rows.lambdas[ready[index], : block.exit_depths[index]].tolist()
        ends_by_length = (rows.position[ready] >= rows.last_position[ready]).tolist()
        ends_by_id = rows.is_end[ready, sampled.token_ids].tolist()
        finite = sampled.finite.tolist()
        for known, good, length, end in zip(
            replayed.tolist(), finite, ends_by_length, ends_by_id, strict=True
        ):
            if known:
                block.reasons.append(FinishReason.NONE)
            elif not good:
                block.reasons.append(FinishReason.ERROR)
            elif length:  # length is tested before end ids
                block.reasons.append(FinishReason.LENGTH)
            else:
                block.reasons.append(FinishReason.STOP_ID if end else FinishReason.NONE)

    def _advance(self, ready: torch.Tensor, sampled: Sampled, replayed: torch.Tensor) -> None:
        """End the rows that are through; put the others on their new token at depth 0."""
        rows, tokens = self._rows, sampled.token_ids
        done = rows.position[ready] >= rows.last_position[ready]
        done |= rows.is_end[ready, tokens] | ~sampled.finite
        done &= ~replayed
        rows.output_counts[ready, tokens] += 1
        rows.position[ready] += 1
        rows.depth[ready] = 0
        rows.survival[ready] = 1.0
        rows.pending[ready] = 0
        rows.hidden[ready] = self._model.prelude(tokens)
        rows.state[ready] = torch.where(done, int(RowState.DONE), int(RowState.LIVE))
