"""Every message that crosses a process boundary, in one file.

    frontend ── FrontendMessage ──▶ scheduler ── StepPlan ──▶ worker
    frontend ◀─ SchedulerMessage ── scheduler ◀─ WorkerMessage ── worker

Messages are tagged positional ``msgspec`` structs; data that exists once per token travels in
columns. Nothing on a socket is ever pickled. Plans and events are deltas: each side keeps its
own state and each message is applied exactly once, in the order in which it was sent.

Words: *position* is a 0-based place in a request's sequence (prompt, then output); *depth* is a
0-based loop index; *exit depth* counts the loops that a token ran (1..T). ``P`` is the number of
prompt tokens and ``T`` the number of loops of the model.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

INITIAL_WEIGHT_VERSION = "default"  # the name of the weights that a server starts with


class ExitMode(enum.IntEnum):
    """When a generated token leaves the loop."""

    OURO = 0
    OURO_DELAYED = 1
    RANDOM_LOOKAHEAD = 2
    LOOKAHEAD = 3
    TRACE = 4


class FinishReason(enum.IntEnum):
    """How a request ended. ``NONE`` compares false: "finished" is one comparison."""

    NONE = 0
    LENGTH = 1  # the last allowed output token was produced
    STOP_ID = 2  # an end id or stop token id was sampled
    STOP_STRING = 3  # the frontend found a stop string and cut the output
    ABORT = 4  # the client asked, or went away
    ERROR = 5  # this row failed (non-finite logits, a dead worker); the server lives on
    STOP_GRAMMAR = 6  # the grammar is complete and no end id may follow it


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of everything that is sent as a whole over a socket."""


class Record(msgspec.Struct, array_like=True):
    """Base of the parts of a message."""


# --------------------------------------------------------------------------- a request


class RowParams(Record):
    """Everything that the worker needs to exit, sample and stop one request, fully resolved.

    Set by the frontend, passed through the scheduler untouched.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    end_ids: list[int] = []  # sorted, unique; empty with ignore_eos
    temperature: float = 1.0  # 0.0 is greedy (the frontend maps everything below 1e-6 to it)
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: list[int] = []
    bias_values: list[float] = []
    seed: int = 0  # unsigned 64 bit; already mixed with the sample index of n > 1
    exit_mode: ExitMode = ExitMode.OURO
    min_loops: int = 1
    max_loops: int = 4
    exit_threshold: float = 1.0
    exit_trace: list[int] | None = None  # exit depth of output i; only with ExitMode.TRACE
    logprobs: bool = False  # log-probability of each output token
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    constrained: bool = False  # every token waits for the Mask of its position
    exit_lambdas: bool = False  # report the exit gate's lambda of each loop that ran


class GenerateReq(Message):
    """One sequence to generate. ``uid`` is the frontend's; it is never used twice."""

    uid: int
    input_ids: list[int]
    params: RowParams
    # Absolute position of the first prompt token whose log-probability is wanted; None: no prompt
    # log-probabilities. At most min(P, start) - 1 prompt tokens may then come from the cache.
    prompt_logprob_start: int | None = None
    extra_key: str | None = None  # radix cache namespace
    priority: int = 0  # higher first
    leader: int | None = None  # of a sample: wait until this uid's prompt is in the radix cache
    # What the output must match, in llguidance's own notation; checked by the frontend. None unless
    # params.constrained.
    grammar: str | None = None


class SampleReq(Message):
    """One more sample (n > 1) of the newest :class:`GenerateReq`, its leader, with a seed of its own.

    Thousands of samples may share a long prompt, bias or grammar, which are so sent and kept once.
    """

    uid: int
    seed: int  # as in RowParams

    def of(self, first: GenerateReq) -> GenerateReq:
        """The whole request; ``first`` is the leader's."""
        params = msgspec.structs.replace(first.params, seed=self.seed)
        return msgspec.structs.replace(first, uid=self.uid, params=params, leader=first.uid)


class AbortReq(Message):
    """End these requests. An unknown or finished uid is ignored."""

    uids: list[int]
    cause: str = "Aborted by the client"  # shown in finish_reason


class StopReq(Message):
    """A stop string was found: cut the output of ``uid`` to its first ``num_tokens`` tokens."""

    uid: int
    num_tokens: int


class ControlOp(enum.IntEnum):
    FLUSH_CACHE = 0  # empty the radix cache; fails while anything runs or waits
    INFO = 1  # statistics, as a JSON-able dict
    # From now on nothing is admitted, prefilled or granted. ``mode`` in the arguments says what becomes
    # of requests: with "abort" all end; with "retract" those on rows go back to the queue's head without
    # their K/V, to be replayed later; with "in_place" they stay where they are.
    PAUSE = 2
    CONTINUE = 3  # undo PAUSE
    # Serve the weights in the folder ``model_path``; ``weight_version`` (None: the next number) names
    # them. Fails while requests run, unless paused. The reply's info holds ``weight_version`` and
    # ``paused_requests``.
    UPDATE_WEIGHTS = 4
    # Begin a profile of the worker, to be written into the folder ``folder``; None: end and write it.
    PROFILE = 5


class ControlReq(Message):
    """A question to the scheduler, answered by a :class:`ControlReply` with the same id."""

    control_id: int
    op: ControlOp
    arguments: dict[str, Any] = {}


class ShutdownReq(Message):
    """Leave the main loop; sent down the line, frontend to scheduler to worker."""


FrontendMessage = GenerateReq | SampleReq | AbortReq | StopReq | ControlReq | ShutdownReq


# --------------------------------------------------------------------------- scheduler to frontend


class SchedulerReady(Message):
    """Start-up is over; the facts that the frontend checks requests against."""

    total_loops: int  # T
    vocab_size: int  # rows of the embedding
    context_length: int  # of the model, or --context-length
    served_length: int  # min(context_length, num_slots // T): longer requests are refused
    num_slots: int
    max_rows: int
    has_lookahead: bool  # a trained lookahead head lies beside the checkpoint
    server_info: dict[str, Any]  # resolved settings, shown by /server_info


class TopLogprobs(Record):
    """Log-probabilities of one token position, beside the token's own."""

    top_values: list[float]
    top_ids: list[int]
    id_values: list[float]  # in the order of token_ids_logprob


class PromptLogprobs(Record):
    """Prompt positions ``start .. start + len(values) - 1``; position 0 has no value (None)."""

    start: int
    values: list[float | None]
    tops: list[TopLogprobs | None] = []  # empty unless asked for; else as long as values


class Started(Record):
    """The prompt of ``uid`` is prefilled."""

    uid: int
    cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None
    weight_versions: list[str] = []  # under which the prompt was computed, oldest first


class OutputLogprobs(Record):
    """One value per new token of a request in this batch."""

    values: list[float]
    tops: list[TopLogprobs] = []  # empty unless asked for


class Finished(Record):
    """The one terminal word on ``uid``.

    ``num_tokens`` is the final number of output tokens: the frontend truncates to it (a stop
    string can cut tokens that were already sent).
    """

    uid: int
    reason: FinishReason
    num_tokens: int
    cached_tokens: int = 0
    num_retractions: int = 0
    matched: int | None = None  # the end id, with STOP_ID
    message: str | None = None  # with ABORT and ERROR
    status: int | None = None  # HTTP status, when the request was refused before it ran
    # Under which the request ran, oldest first; more than one after an update in its midst. Empty if
    # it never ran.
    weight_versions: list[str] = []


class TokenBatch(Message):
    """What one step brought, for all requests. Order: started, then tokens, then finished."""

    started: list[Started] = []
    uids: list[int] = []  # requests with new tokens, each once
    counts: list[int] = []  # new tokens of each
    token_ids: list[int] = []  # concatenated in the order of uids
    exit_depths: list[int] = []  # parallel to token_ids
    logprobs: dict[int, OutputLogprobs] = {}  # by uid, only where asked for
    finished: list[Finished] = []
    exit_lambdas: dict[int, list[list[float]]] = {}  # by uid, likewise; one list per new token


class ControlReply(Message):
    control_id: int
    ok: bool
    message: str = ""
    info: dict[str, Any] = {}


class SchedulerFailed(Message):
    """The scheduler cannot go on (worker dead, broken invariant). Every request has ended."""

    message: str


SchedulerMessage = SchedulerReady | TokenBatch | ControlReply | SchedulerFailed


# --------------------------------------------------------------------------- scheduler to worker


class Admit(Record):
    """Put a request on a row. Its first chunk comes in the same plan or a later one.

    ``cached_slots`` are the slots of the cached prefix, depth-major: ``[T * cached_len]``, entry
    ``d * cached_len + p``. Every slot of a row reaches the worker by Admit, Segment or Grant.

    A request that was retracted is replayed: its first outputs are ``forced_ids``, predicted after
    ``forced_depths`` loops (as long; the first is the prompt's T), whatever its policy and its
    sampling say. No end is looked for among them and none of them waits for a Mask. What comes
    behind them is as if the row had produced them itself.
    """

    row: int
    epoch: int  # unique per admission of this row, increasing
    input_ids: list[int]
    params: RowParams
    cached_len: int = 0
    cached_slots: list[int] = []
    prompt_logprob_start: int | None = None
    forced_ids: list[int] = []
    forced_depths: list[int] = []


class Segment(Record):
    """Prompt positions ``start .. end - 1`` of a row; ``slots`` is depth-major [T * (end-start)]."""

    row: int
    epoch: int
    start: int
    end: int
    slots: list[int]


class Chunk(Record):
    """One prefill batch: packed segments of PREFILL rows, all T loops in one go.

    Chunks run and retire in the order of their ids. When the segment that reaches P retires, the
    worker makes the row live by itself: with max_new_tokens 0 the row is DONE, else its next state
    is CODA at depth T. In layout ``shared`` it first points every depth of all prompt positions at
    the slot of depth T-1.
    """

    chunk_id: int
    segments: list[Segment]


class Grant(Record):
    """Slots for positions ``start ..`` of a row.

    ``widths[i]`` slots belong to position ``start + i``; ``slots`` is their concatenation,
    shallowest depth first. Table entries deeper than the width point at the position's last slot.
    """

    row: int
    epoch: int
    start: int
    widths: list[int]
    slots: list[int]


class Mask(Record):
    """The tokens that may follow ``position`` (the position that predicts them) of a constrained row.

    ``bits``: ceil(V / 32) little-endian 32-bit words, bit ``i % 32`` of word ``i // 32`` allows id i.
    """

    row: int
    epoch: int
    position: int
    bits: bytes


class Release(Record):
    """End a row from the host (abort, stop string, retraction). Ignored when the epoch is not current."""

    row: int
    epoch: int


class StepPlan(Message):
    """One numbered delta, applied between two rounds: releases, admits, grants, masks, then chunks.

    Rounds run without plans; ``plan_id`` counts from 1 without gaps.
    """

    plan_id: int
    releases: list[Release] = []
    admits: list[Admit] = []
    grants: list[Grant] = []
    chunks: list[Chunk] = []
    masks: list[Mask] = []


class UpdateWeights(Message):
    """Serve the weights in the folder ``model_path`` from the next round on.

    They are loaded and checked as a whole before the first old one is overwritten. Answered by a
    :class:`WeightsUpdated`.
    """

    model_path: str


class Profile(Message):
    """Begin a profile that is to be written into ``folder``, or with None end it and write it. Answered by
    a :class:`Profiled`."""

    folder: str | None


PlanMessage = StepPlan | UpdateWeights | Profile | ShutdownReq


# --------------------------------------------------------------------------- worker to scheduler


class WorkerReady(Message):
    """The worker has its weights, its slots and its static buffers."""

    total_loops: int
    vocab_size: int
    context_length: int
    num_slots: int
    max_rows: int
    rounds_in_flight: int
    has_lookahead: bool
    server_info: dict[str, Any]


class ChunkLogprobs(Record):
    """Log-probabilities of prompt tokens, from one segment of a retired chunk.

    The hidden state at position p gives the value of the token at p + 1, so positions
    ``start ..`` here are those of the predicted tokens and may end one past the segment.
    """

    row: int
    epoch: int
    start: int
    values: list[float]
    tops: list[TopLogprobs] = []


class RoundEvents(Message):
    """What retired since the last message of this kind.

    ``applied_plan``: the newest plan such that it was applied and every round launched before it
    has retired. ``retired_round`` and ``retired_chunk``: the newest that retired (all older ones
    have too). The worker also sends one when a plan was applied and nothing runs, so a plan is
    always acknowledged. Event i says: the token at position ``positions[i]`` of the row left the
    loop after ``exit_depths[i]`` loops and predicted ``token_ids[i]``, which belongs at
    ``positions[i] + 1``. ``reasons[i]`` other than NONE: the row is DONE on the device; with ERROR the
    token is void and not part of the output. Forced outputs of a row have events like all others; their
    log-probabilities mean nothing.
    An event whose epoch is not the row's current one must be dropped.
    """

    applied_plan: int
    retired_round: int
    retired_chunk: int
    rows: list[int] = []
    epochs: list[int] = []
    positions: list[int] = []
    token_ids: list[int] = []
    exit_depths: list[int] = []
    reasons: list[FinishReason] = []
    logprobs: dict[int, float] = {}  # by event index, rows that asked for it only
    tops: dict[int, TopLogprobs] = {}  # likewise
    chunk_logprobs: list[ChunkLogprobs] = []
    round_stats: dict[str, float] = {}  # rounds, lanes, exits since the last message
    # By event index, rows that asked for it only: the exit gate's lambda after each of the loops.
    exit_lambdas: dict[int, list[float]] = {}


class WeightsUpdated(Message):
    """What became of an :class:`UpdateWeights`. If it failed, the old weights go on serving."""

    ok: bool
    message: str


class Profiled(Message):
    """What became of a :class:`Profile`: the file it was written to, or why not."""

    ok: bool
    message: str


class WorkerFailed(Message):
    """The worker met an error that it cannot contain in one row and is about to exit."""

    message: str


WorkerMessage = WorkerReady | RoundEvents | WeightsUpdated | Profiled | WorkerFailed
