"""Device-resident state of every row: what a round needs, so that no round asks the host.

All columns are tensors indexed by row. Plans are the only writers besides the round itself, and
they write between rounds: a few uploads from pinned memory and device operations per plan entry, nothing
that waits for the device.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from ouro_sgl.messages import Admit, Grant, Mask
from ouro_sgl.worker.attention import padded_length


class RowState(enum.IntEnum):
    FREE = 0
    PREFILL = 1  # admitted; its prompt is not yet in the cache
    LIVE = 2  # runs the core in the next round, if its position is granted
    CODA = 3  # left the loop, waits for lm_head
    STALLED = 4  # at a position without slots: goes on when a grant arrives
    DONE = 5  # ended on the device, or released


# Columns of the integer matrix. The first four are what an activation sets.
INTEGERS = (
    "state",
    "position",
    "depth",  # loops that the current token has run
    "coda_wait",  # rounds since it left the loop
    "epoch",
    "pending",  # a delayed or lookahead exit was triggered (0 or 1)
    "prompt_length",
    "last_position",  # the last position that runs: it predicts the last allowed token
    "granted_until",
    "exit_mode",
    "min_loops",
    "max_loops",
    "seed",
    "top_k",
    "min_new_tokens",
    "penalised",
    "biased",
    "constrained",
    "mask_position",  # the position whose mask lies in ``mask``
    "reports_lambdas",
    "replay_until",  # positions before it are replayed: their token and exit depth are known; 0: none
)
FLOATS = (
    "survival",
    "exit_threshold",
    "temperature",
    "top_p",
    "min_p",
    "frequency",
    "presence",
    "repetition",
)


def signed64(value: int) -> int:
    """An unsigned 64-bit value as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


class Rows:
    """Row state of up to ``max_rows`` requests of at most ``max_length`` positions.

    Every name in ``INTEGERS`` is an attribute [R] int64, every name in ``FLOATS`` one [R] fp32: views
    of one matrix each, so that an admission is one copy. ``slot_table`` is [T, R, max_length (padded
    to whole attention tiles)] int32: the slot of every (depth, row, position). A decode kernel reads
    only the columns of its own row up to its own position.
    """

    state: torch.Tensor
    position: torch.Tensor
    depth: torch.Tensor
    coda_wait: torch.Tensor
    epoch: torch.Tensor
    pending: torch.Tensor
    prompt_length: torch.Tensor
    last_position: torch.Tensor
    granted_until: torch.Tensor
    exit_mode: torch.Tensor
    min_loops: torch.Tensor
    max_loops: torch.Tensor
    seed: torch.Tensor
    top_k: torch.Tensor
    min_new_tokens: torch.Tensor
    penalised: torch.Tensor
    biased: torch.Tensor
    constrained: torch.Tensor
    mask_position: torch.Tensor
    reports_lambdas: torch.Tensor
    replay_until: torch.Tensor
    survival: torch.Tensor
    exit_threshold: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

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
        self.max_rows = max_rows
        self.total_loops = total_loops
        self.device = device
        self._integers = torch.zeros(len(INTEGERS), max_rows, dtype=torch.int64, device=device)
        self._floats = torch.zeros(len(FLOATS), max_rows, dtype=torch.float32, device=device)
        for index, name in enumerate(INTEGERS):
            setattr(self, name, self._integers[index])
        for index, name in enumerate(FLOATS):
            setattr(self, name, self._floats[index])

        def table(kind: torch.dtype, width: int) -> torch.Tensor:
            return torch.zeros(max_rows, width, dtype=kind, device=device)

        self.hidden = table(dtype, hidden_size)
        self.trace = table(torch.int8, max_length)  # exit depth demanded at each position
        self.forced = table(torch.int32, max_length)  # of replayed positions: the token that they predict
        self.output_counts = table(torch.int32, vocab_size)
        self.prompt_seen = table(torch.bool, vocab_size)
        self.bias = table(torch.float32, vocab_size)
        self.is_end = table(torch.bool, vocab_size)
        self.mask = table(torch.int32, -(-vocab_size // 32))  # bit i % 32 of word i // 32 allows id i
        # the exit gate's value after each loop of the current token, of rows that report them
        self.lambdas = table(torch.float32, total_loops)
        self.slot_table = torch.zeros(
            total_loops, max_rows, padded_length(max_length), dtype=torch.int32, device=device
        )

    def upload(self, values: Sequence[int] | Sequence[float], kind: torch.dtype) -> torch.Tensor:
        """Host values on the device; the host never waits (the allocator keeps the pinned copy alive)."""
        host = torch.tensor(values, dtype=kind)
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def admit(self, admit: Admit) -> None:
        """Give a row to a request: everything that is resident about it but its slots."""
        row, params, length = admit.row, admit.params, len(admit.input_ids)
        penalised = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        penalised = penalised or params.repetition_penalty != 1.0
        integers = {
            "state": RowState.PREFILL,
            "epoch": admit.epoch,
            "prompt_length": length,
            "last_position": length + params.max_new_tokens - 2,
            "granted_until": length,
            "exit_mode": params.exit_mode,
            "min_loops": params.min_loops,
            "max_loops": params.max_loops,
            "seed": signed64(params.seed),
            "top_k": params.top_k,
            "min_new_tokens": params.min_new_tokens,
            "penalised": penalised,
            "biased": bool(params.bias_ids),
            "constrained": params.constrained,
            "mask_position": -1,
            "reports_lambdas": params.exit_lambdas,
            "replay_until": length - 1 + len(admit.forced_ids) if admit.forced_ids else 0,
        }
        floats = {
            "survival": 1.0,
            "exit_threshold": params.exit_threshold,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            "repetition": params.repetition_penalty,
        }
        self._integers[:, row] = self.upload([int(integers.get(n, 0)) for n in INTEGERS], torch.int64)
        self._floats[:, row] = self.upload([float(floats.get(n, 0.0)) for n in FLOATS], torch.float32)
        if params.exit_trace is not None:
            # entry i is the depth of position length - 1 + i, so entry 0 is the prefill's
            depths = params.exit_trace[: max(1, params.max_new_tokens)]
            self.trace[row, length - 1 : length - 1 + len(depths)] = self.upload(depths, torch.int8)
        if admit.forced_ids:
            known = slice(length - 1, length - 1 + len(admit.forced_ids))
            self.trace[row, known] = self.upload(admit.forced_depths, torch.int8)
            self.forced[row, known] = self.upload(admit.forced_ids, torch.int32)
        if penalised:
            self.output_counts[row] = 0
            self.prompt_seen[row] = False
            self.prompt_seen[row].index_fill_(0, self.upload(admit.input_ids, torch.int64), 1)
        if params.bias_ids:
            self.bias[row] = 0.0
            ids = self.upload(params.bias_ids, torch.int64)
            self.bias[row].index_copy_(0, ids, self.upload(params.bias_values, torch.float32))
        self.is_end[row] = False
        if params.end_ids:
            self.is_end[row].index_fill_(0, self.upload(params.end_ids, torch.int64), 1)

    def replayed(self, at: torch.Tensor) -> torch.Tensor:
        """Which of the rows ``at`` [M] stand at a position whose token and exit depth are known: [M] bool."""
        return self.position[at] < self.replay_until[at]

    def set_prompt_slots(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Slots of the prompt positions ``start ..``, depth-major [T * n]."""
        columns = self.upload(slots, torch.int32).view(self.total_loops, -1)
        self.slot_table[:, row, start : start + columns.shape[1]] = columns

    def grant(self, grants: Sequence[Grant]) -> None:
        """Slots for coming positions; entries deeper than a position's width repeat its last slot."""
        places: list[int] = []  # flat index into the table of one depth
        columns: list[int] = []
        width_of_table = self.slot_table.shape[2]
        for grant in grants:
            taken = 0
            for offset, width in enumerate(grant.widths):
                slots = grant.slots[taken : taken + width]
                columns.extend(slots + slots[-1:] * (self.total_loops - width))
                places.append(grant.row * width_of_table + grant.start + offset)
                taken += width
        values = self.upload(columns, torch.int32).view(len(places), self.total_loops)
        flat = self.slot_table.view(self.total_loops, -1)
        flat.index_copy_(1, self.upload(places, torch.int64), values.T.contiguous())
        rows = self.upload([grant.row for grant in grants], torch.int64)
        until = self.upload([grant.start + len(grant.widths) for grant in grants], torch.int64)
        self.granted_until.index_copy_(0, rows, until)

    def set_mask(self, mask: Mask) -> None:
        """The row's coda at ``mask.position`` may run."""
        words = torch.frombuffer(bytearray(mask.bits), dtype=torch.int32)
        if self.device.type != "cpu":
            words = words.pin_memory().to(self.device, non_blocking=True)
        self.mask[mask.row] = words
        self.mask_position[mask.row] = mask.position

    def activate(
        self,
        row: int,
        prompt_length: int,
        hidden: torch.Tensor,
        *,
        share_last: bool,
        lambdas: torch.Tensor | None = None,
    ) -> None:
        """The prompt is in the cache: sample the first token from h_T [H] in the next round's coda.

        ``share_last`` (layout ``shared``): from now on every depth of the prompt reads the last loop.
        ``lambdas`` [T] fp32: the exit gate's values at the last prompt token, if the row reports them.
        """
        if lambdas is not None:
            self.lambdas[row] = lambdas
        if share_last:
            last = self.slot_table[-1, row, :prompt_length].clone()
            self.slot_table[:, row, :prompt_length] = last
        self.hidden[row] = hidden
        self._integers[:4, row] = self.upload(
            [RowState.CODA, prompt_length - 1, self.total_loops, 0], torch.int64
        )

    def end(self, row: int) -> None:
        """End a row from the host."""
        self.state[row] = int(RowState.DONE)
