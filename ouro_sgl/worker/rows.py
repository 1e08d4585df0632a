"""Device-resident state of every row: what a round needs, so that no round asks the host.

All columns are tensors indexed by row. Plans are the only writers besides the round itself, and
they write between rounds.
"""

from __future__ import annotations

import enum

import torch

from ouro_sgl.messages import Admit, Grant
from ouro_sgl.worker.attention import padded_length


class RowState(enum.IntEnum):
    FREE = 0
    PREFILL = 1  # admitted; its prompt is not yet in the cache
    LIVE = 2  # runs the core in the next round, if its position is granted
    CODA = 3  # left the loop, waits for lm_head
    STALLED = 4  # at a position without slots: goes on when a grant arrives
    DONE = 5  # ended on the device, or released


def signed64(value: int) -> int:
    """An unsigned 64-bit value as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


class Rows:
    """Row state of up to ``max_rows`` requests of at most ``max_length`` positions.

    ``depth`` counts the loops that the row's current token has run. ``slot_table`` is
    [T, rows, max_length (padded to whole attention tiles)] int32: the slot of every (depth, row,
    position). A decode kernel reads only the columns of its own row up to its own position.
    """

    def __init__(
        self,
        max_rows: int,
        max_length: int,
        total_loops: int,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def column(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(max_rows, *shape, dtype=kind, device=device)

        self.max_rows = max_rows
        self.total_loops = total_loops
        self.device = device
        # where the row stands
        self.state = column(torch.int64)
        self.epoch = column(torch.int64)
        self.token = column(torch.int64)
        self.position = column(torch.int64)
        self.depth = column(torch.int64)
        self.hidden = column(dtype, hidden_size)
        self.survival = column(torch.float32)
        self.pending = column(torch.bool)
        self.coda_wait = column(torch.int64)
        # where it may go
        self.prompt_length = column(torch.int64)
        self.last_position = column(torch.int64)
        self.granted_until = column(torch.int64)
        # when it leaves the loop
        self.exit_mode = column(torch.int64)
        self.min_loops = column(torch.int64)
        self.max_loops = column(torch.int64)
        self.exit_threshold = column(torch.float32)
        self.trace = column(torch.int8, max_length)
        # how it samples
        self.seed = column(torch.int64)
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float32)
        self.top_k = column(torch.int64)
        self.min_p = column(torch.float32)
        self.frequency = column(torch.float32)
        self.presence = column(torch.float32)
        self.repetition = column(torch.float32)
        self.min_new_tokens = column(torch.int64)
        self.penalised = column(torch.bool)
        self.biased = column(torch.bool)
        self.output_counts = column(torch.int32, vocab_size)
        self.prompt_seen = column(torch.bool, vocab_size)
        self.bias = column(torch.float32, vocab_size)
        self.is_end = column(torch.bool, vocab_size)
        self.slot_table = torch.zeros(
            total_loops, max_rows, padded_length(max_length), dtype=torch.int32, device=device
        )

    def admit(self, admit: Admit) -> None:
        """Give a row to a request: everything that is resident about it, and its cached prefix."""
        row, params, length = admit.row, admit.params, len(admit.input_ids)
        self.state[row] = RowState.PREFILL
        self.epoch[row] = admit.epoch
        self.prompt_length[row] = length
        self.last_position[row] = length + params.max_new_tokens - 2
        self.granted_until[row] = length
        self.exit_mode[row] = params.exit_mode
        self.min_loops[row] = params.min_loops
        self.max_loops[row] = params.max_loops
        self.exit_threshold[row] = params.exit_threshold
        self.seed[row] = signed64(params.seed)
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k
        self.min_p[row] = params.min_p
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        self.repetition[row] = params.repetition_penalty
        self.min_new_tokens[row] = params.min_new_tokens
        if params.exit_trace is not None:
            # entry i is the depth of position length - 1 + i, so entry 0 is the prefill's
            depths = params.exit_trace[: params.max_new_tokens]
            self.trace[row, length - 1 : length - 1 + len(depths)] = torch.tensor(depths, dtype=torch.int8)
        self._admit_vocabulary(admit)
        if admit.cached_len:
            slots = torch.tensor(admit.cached_slots, dtype=torch.int32, device=self.device)
            self.slot_table[:, row, : admit.cached_len] = slots.view(self.total_loops, admit.cached_len)

    def _admit_vocabulary(self, admit: Admit) -> None:
        """The [V] tables; rows that do not use one never read it."""
        row, params = admit.row, admit.params
        penalised = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        penalised = penalised or params.repetition_penalty != 1.0
        self.penalised[row] = penalised
        if penalised:
            self.output_counts[row] = 0
            self.prompt_seen[row] = False
            self.prompt_seen[row, torch.tensor(admit.input_ids, device=self.device)] = True
        self.biased[row] = bool(params.bias_ids)
        if params.bias_ids:
            self.bias[row] = 0.0
            ids = torch.tensor(params.bias_ids, device=self.device)
            self.bias[row, ids] = torch.tensor(params.bias_values, device=self.device)
        self.is_end[row] = False
        self.is_end[row, torch.tensor(params.end_ids, dtype=torch.int64, device=self.device)] = True

    def set_prompt_slots(self, row: int, start: int, slots: torch.Tensor) -> None:
        """Slots [T, n] of the prompt positions ``start ..``."""
        self.slot_table[:, row, start : start + slots.shape[1]] = slots

    def grant(self, grant: Grant) -> None:
        """Slots for coming positions; entries deeper than a position's width repeat its last slot."""
        if int(self.epoch[grant.row]) != grant.epoch:
            return
        columns, taken = [], 0
        for width in grant.widths:
            slots = grant.slots[taken : taken + width]
            columns.append(slots + slots[-1:] * (self.total_loops - width))
            taken += width
        table = torch.tensor(columns, dtype=torch.int32, device=self.device).T
        self.slot_table[:, grant.row, grant.start : grant.start + len(columns)] = table
        self.granted_until[grant.row] = grant.start + len(columns)

    def activate(self, row: int, hidden: torch.Tensor, *, share_last: bool) -> None:
        """The prompt is in the cache: sample the first token from h_T [H] in the next round's coda.

        ``share_last`` (layout ``shared``): from now on every depth of the prompt reads the last loop.
        """
        length = int(self.prompt_length[row])
        if share_last:
            self.slot_table[:, row, :length] = self.slot_table[-1, row, :length].clone()
        self.hidden[row] = hidden
        self.position[row] = length - 1
        self.depth[row] = self.total_loops
        self.coda_wait[row] = 0
        self.state[row] = RowState.CODA

    def release(self, row: int, epoch: int) -> bool:
        """End a row from the host; False if another request has it by now."""
        if int(self.epoch[row]) != epoch:
            return False
        self.state[row] = RowState.DONE
        return True
