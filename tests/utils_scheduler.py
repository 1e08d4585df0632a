"""A worker without a model, and a client, for tests of the scheduler.

``FakeWorker`` follows the contract of plans and events and checks the scheduler from the other
side. It keeps what every slot *holds*: the hash of the token prefix that K/V was made from and the
depth. Whatever a row reads through its table must hold exactly its own prefix, so a slot that was
freed, granted or aliased wrongly is caught by the first read. Tokens and exit depths are pure
functions of the prefix: :func:`expected_output` knows what every request has to answer.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from ouro_sgl.kvcache.layout import LAYOUTS
from ouro_sgl.messages import (
    Admit,
    Chunk,
    ChunkLogprobs,
    ControlOp,
    ControlReply,
    ControlReq,
    Finished,
    FinishReason,
    GenerateReq,
    Grant,
    Mask,
    RoundEvents,
    RowParams,
    Started,
    StepPlan,
    TokenBatch,
    TopLogprobs,
    UpdateWeights,
    WeightsUpdated,
)
from ouro_sgl.scheduler.config import SchedulerConfig
from ouro_sgl.scheduler.grammar import NextTokens
from ouro_sgl.scheduler.request import RequestState
from ouro_sgl.scheduler.scheduler import Scheduler

VOCAB = 97


def extend_hash(prefix: int, token: int) -> int:
    return hash((prefix, token))


def prefix_hash(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = extend_hash(value, token)
    return value


def next_token(prefix: int) -> int:
    return prefix % VOCAB


def exit_depth(prefix: int, index: int, params: RowParams) -> int:
    """Loops of the position of output ``index``, whose prefix (itself included) has this hash."""
    if params.exit_trace is not None:
        return params.exit_trace[index + 1]
    return params.min_loops + (prefix // VOCAB) % (params.max_loops - params.min_loops + 1)


def prompt_logprob(prefix: int, token: int) -> float:
    """Of ``token`` after the prefix with this hash."""
    return -float(hash((prefix, token)) % 1000) / 100


def grammar_ids(source: str, index: int, vocab: int = VOCAB) -> set[int]:
    """What a grammar of :class:`FakeGrammars` allows after ``index`` tokens, end ids aside.

    ``source`` is "STEP LENGTH": LENGTH tokens, each a multiple of STEP.
    """
    if source.startswith("fail"):
        return set(range(vocab))
    step, length = map(int, source.split())
    return set(range(0, vocab, step)) if index < length else set()


def allowed_token(wanted: int, allowed: set[int]) -> int:
    """The first allowed id from ``wanted`` on, around the end of the vocabulary."""
    return min(allowed, key=lambda token: (token - wanted) % VOCAB)


def expected_output(
    prompt: list[int], params: RowParams, loops: int, grammar: str | None = None
) -> tuple[list[int], list[int], FinishReason]:
    """Tokens, exit depths and ending of a request that nobody disturbs."""
    prefix = prefix_hash(prompt)
    tokens: list[int] = []
    depths: list[int] = []
    reason = FinishReason.LENGTH
    while len(tokens) < params.max_new_tokens:
        depths.append(loops if not tokens else exit_depth(prefix, len(tokens) - 1, params))
        token = next_token(prefix)
        if grammar is not None:
            allowed = grammar_ids(grammar, len(tokens))
            if not allowed and not params.end_ids:
                depths.pop()
                reason = FinishReason.STOP_GRAMMAR
                break
            token = allowed_token(token, allowed or set(params.end_ids))
        tokens.append(token)
        prefix = extend_hash(prefix, tokens[-1])
        if len(tokens) < params.max_new_tokens and tokens[-1] in params.end_ids:
            reason = FinishReason.STOP_ID
            break
    return tokens, depths, reason


class FakeGrammars:
    """Grammars as in :func:`grammar_ids`, found out after a random delay; "fail N" fails after N tokens."""

    def __init__(self, rng: random.Random, vocab: int = VOCAB) -> None:
        self.rng = rng
        self.vocab = vocab
        self.open: dict[int, tuple[str, list[int], int]] = {}  # source, end ids, tokens matched
        self.found: list[NextTokens] = []

    def start(self, uid: int, source: str, end_ids: list[int]) -> None:
        assert uid not in self.open
        self.open[uid] = (source, end_ids, 0)
        self._find(uid)

    def advance(self, uid: int, token_id: int) -> None:
        source, end_ids, index = self.open[uid]
        assert token_id in grammar_ids(source, index, self.vocab), "a token that the mask had excluded"
        self.open[uid] = (source, end_ids, index + 1)
        self._find(uid)

    def forget(self, uid: int) -> None:
        del self.open[uid]

    def take(self) -> list[NextTokens]:
        ready = [found for found in self.found if self.rng.random() < 0.5]
        self.found = [found for found in self.found if found not in ready]
        return ready

    def _find(self, uid: int) -> None:
        source, end_ids, index = self.open[uid]
        if source.startswith("fail") and index >= int(source.split()[1]):
            self.found.append(NextTokens(uid, index, error="no way on"))
            return
        allowed = grammar_ids(source, index, self.vocab)
        bits = sum(1 << token for token in allowed or set(end_ids))
        words = bits.to_bytes(-(-self.vocab // 32) * 4, "little")
        self.found.append(NextTokens(uid, index, words, complete=not allowed))


@dataclass
class FakeRow:
    epoch: int
    params: RowParams
    tokens: list[int]  # prompt and output
    hashes: list[int]  # of the prefix that ends with each token
    prompt_len: int
    logprob_start: int | None
    table: list[list[int]]  # [T][position]
    prefilled: int  # prompt positions whose slots are here
    state: str = "prefill"  # prefill | live | coda | done
    position: int = 0
    depth: int = 0
    granted_until: int = 0
    mask: Mask | None = None
    forced_ids: list[int] = field(default_factory=list)
    forced_depths: list[int] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)  # exit depth by generated position

    @property
    def replays(self) -> bool:
        return self.position < self.prompt_len - 1 + len(self.forced_ids)

    def forced_depth(self, position: int) -> int | None:
        """The depth that is known of a position, if it is replayed."""
        at = position - self.prompt_len + 1
        return self.forced_depths[at] if at < len(self.forced_depths) else None


@dataclass
class Launched:
    """A round that was launched: what it touches and what it will report."""

    uses: set[int]
    events: list[tuple]


class FakeWorker:
    """Executes plans; every check is an assertion."""

    def __init__(
        self, config: SchedulerConfig, rng: random.Random, error_rate: float = 0.0, exact: bool = True
    ) -> None:
        self.config = config
        self.loops = config.total_loops
        self.layout = LAYOUTS[config.kv_layout](config.total_loops)
        self.shared = config.kv_layout == "shared"
        self.rng = rng
        self.error_rate = error_rate
        self.exact = exact  # cached prefixes were written by prefill alone
        self.rows: dict[int, FakeRow] = {}
        self.holds: dict[int, tuple[int, int]] = {}  # slot: (prefix hash, depth)
        self.in_use: Counter[int] = Counter()  # by launched rounds and chunks
        self.rounds: deque[Launched] = deque()
        self.chunks: deque[tuple[Chunk, list[int]]] = deque()
        self.plan_id = 0
        self.chunk_id = 0
        self.launched = self.retired = 0
        self.retired_chunk = 0
        self.unread = 0  # rounds that retired since the last message
        self.acknowledged = 0
        self.applied: deque[tuple[int, int]] = deque()  # plan id, rounds launched before it
        self.events: list[tuple] = []
        self.chunk_logprobs: list[ChunkLogprobs] = []
        self.reported = (0, 0, 0)

    # ------------------------------------------------------------------ plans

    def apply(self, plan: StepPlan) -> None:
        assert plan.plan_id == self.plan_id + 1
        self.plan_id = plan.plan_id
        for release in plan.releases:
            row = self.rows[release.row]
            if row.epoch == release.epoch:
                row.state = "done"
        for admit in plan.admits:
            old = self.rows.get(admit.row)
            assert 0 <= admit.row < self.config.max_rows
            assert old is None or (old.state == "done" and old.epoch < admit.epoch)
            cached = admit.cached_len
            assert len(admit.cached_slots) == self.loops * cached
            assert cached < len(admit.input_ids)
            if admit.prompt_logprob_start is not None:
                assert cached <= max(admit.prompt_logprob_start - 1, 0)
            hashes: list[int] = []
            for token in admit.input_ids:
                hashes.append(extend_hash(hashes[-1] if hashes else 0, token))
            self.rows[admit.row] = FakeRow(
                epoch=admit.epoch,
                params=admit.params,
                tokens=list(admit.input_ids),
                hashes=hashes,
                prompt_len=len(admit.input_ids),
                logprob_start=admit.prompt_logprob_start,
                table=[admit.cached_slots[d * cached : (d + 1) * cached] for d in range(self.loops)],
                prefilled=cached,
                granted_until=len(admit.input_ids),
                forced_ids=admit.forced_ids,
                forced_depths=admit.forced_depths,
            )
            self._check_forced(admit)
        for grant in plan.grants:
            self._grant(grant)
        for mask in plan.masks:
            row = self.rows[mask.row]
            if row.epoch == mask.epoch and row.state != "done":
                assert row.params.constrained
                assert row.mask is None or mask.position == row.mask.position + 1
                assert mask.position == max(len(row.tokens), row.prompt_len + len(row.forced_ids)) - 1
                row.mask = mask
        for chunk in plan.chunks:
            self._chunk(chunk)
        self.applied.append((plan.plan_id, self.launched))

    def _check_forced(self, admit: Admit) -> None:
        """A request comes back with what this worker made of it before."""
        prefix = prefix_hash(admit.input_ids)
        assert len(admit.forced_ids) == len(admit.forced_depths)
        for index, (token, depth) in enumerate(zip(admit.forced_ids, admit.forced_depths, strict=True)):
            assert depth == (exit_depth(prefix, index - 1, admit.params) if index else self.loops)
            assert admit.params.constrained or token == next_token(prefix)
            prefix = extend_hash(prefix, token)

    def _take(self, slots: list[int]) -> None:
        """Slots that the scheduler gives to a row: nothing launched may still use them."""
        assert len(set(slots)) == len(slots)
        for slot in slots:
            assert 0 <= slot < self.config.num_slots
            assert not self.in_use[slot], f"slot {slot} is granted while a launched round uses it"
            self.holds.pop(slot, None)

    def _grant(self, grant: Grant) -> None:
        self._take(grant.slots)
        row = self.rows[grant.row]
        if row.epoch != grant.epoch or row.state == "done":
            return
        assert grant.start == row.granted_until
        assert grant.widths
        assert sum(grant.widths) == len(grant.slots)
        at = 0
        for width in grant.widths:
            index = row.granted_until - row.prompt_len
            known = row.forced_depth(row.granted_until)
            wanted = self.layout.width(row.params, index) if known is None else self.layout.used(known)
            assert width == wanted
            slots = grant.slots[at : at + width]
            at += width
            for depth in range(self.loops):
                column = row.table[depth]
                column += [-1] * (row.granted_until + 1 - len(column))
                column[row.granted_until] = slots[min(depth, width - 1)]
            row.granted_until += 1
        assert row.granted_until <= row.prompt_len + row.params.max_new_tokens - 1
        running = max(row.position, row.prompt_len) if row.state != "prefill" else row.prompt_len
        assert row.granted_until <= running + 2 * self.config.rounds_in_flight

    def _chunk(self, chunk: Chunk) -> None:
        assert chunk.chunk_id == self.chunk_id + 1
        assert chunk.segments
        self.chunk_id = chunk.chunk_id
        assert sum(s.end - s.start for s in chunk.segments) <= self.config.chunked_prefill_size
        assert len(self.chunks) < self.config.max_chunks_ahead
        uses: list[int] = []
        for segment in chunk.segments:
            self._take(segment.slots)
            row = self.rows[segment.row]
            assert row.epoch == segment.epoch
            assert row.state == "prefill"
            assert segment.start == row.prefilled < segment.end <= row.prompt_len
            size = segment.end - segment.start
            assert len(segment.slots) == self.loops * size
            for depth in range(self.loops):
                column = row.table[depth]
                column += [-1] * (segment.end - len(column))
                column[segment.start : segment.end] = segment.slots[depth * size : (depth + 1) * size]
            row.prefilled = segment.end
            uses += [slot for column in row.table for slot in column[: segment.end]]
        for slot in uses:
            self.in_use[slot] += 1
        self.chunks.append((chunk, uses))

    # ------------------------------------------------------------------ the device

    def _reads(self, row: FakeRow, slot: int, position: int, depth: int) -> None:
        """``slot`` must hold the K/V that this row's own prefix has at ``depth``."""
        assert slot in self.holds, f"position {position} depth {depth} reads slot {slot}, which was freed"
        prefix, written = self.holds[slot]
        assert prefix == row.hashes[position], f"position {position} reads a stranger's slot {slot}"
        if position >= row.prompt_len:
            last = row.exits[position] - 1
            assert written == (last if self.shared else min(depth, last))
        elif self.shared and row.state != "prefill":
            assert written == self.loops - 1
        else:
            assert written == depth or (not self.exact and written <= depth)

    def retire_chunk(self) -> None:
        """Run the oldest chunk, as late as possible, and let it retire."""
        chunk, uses = self.chunks.popleft()
        for segment in chunk.segments:
            row = self.rows[segment.row]
            if row.epoch != segment.epoch or row.state != "prefill":
                assert row.epoch == segment.epoch, "the row was reused before its chunk retired"
                continue
            for depth in range(self.loops):
                for position in range(segment.start, segment.end):
                    self.holds[row.table[depth][position]] = (row.hashes[position], depth)
                for position in range(segment.end):
                    self._reads(row, row.table[depth][position], position, depth)
            self._prompt_logprobs(row, segment.row, segment.start, segment.end)
            if segment.end == row.prompt_len:
                self._go_live(row)
        self.in_use.subtract(uses)
        self.retired_chunk = chunk.chunk_id

    def _prompt_logprobs(self, row: FakeRow, number: int, start: int, end: int) -> None:
        if row.logprob_start is None:
            return
        values = [
            prompt_logprob(row.hashes[p], row.tokens[p + 1] if p + 1 < row.prompt_len else 0)
            for p in range(start, end)
        ]
        tops = []
        if row.params.top_logprobs_num:
            tops = [TopLogprobs([value], [0], []) for value in values]
        self.chunk_logprobs.append(ChunkLogprobs(number, row.epoch, start + 1, values, tops))

    def _go_live(self, row: FakeRow) -> None:
        if self.shared:
            for depth in range(self.loops - 1):
                row.table[depth][: row.prompt_len] = row.table[-1][: row.prompt_len]
        row.state = "coda" if row.params.max_new_tokens else "done"
        row.position, row.depth = row.prompt_len - 1, self.loops

    def launch_round(self) -> None:
        """One round over all live rows. Effects are at once, retirement comes later."""
        launched = Launched(set(), [])
        for number, row in self.rows.items():
            if row.state == "live" and row.position < row.granted_until:
                self._core(row, launched.uses)
            masked = row.mask is not None and row.mask.position == row.position
            ready = not row.params.constrained or masked or row.replays
            if row.state == "coda" and ready and self.rng.random() < 0.8:
                self._coda(row, number, launched.events)
        self.launched += 1
        for slot in launched.uses:
            self.in_use[slot] += 1
        self.rounds.append(launched)

    def _core(self, row: FakeRow, uses: set[int]) -> None:
        position, depth = row.position, row.depth
        self.holds[row.table[depth][position]] = (row.hashes[position], depth)
        for before in range(position):
            self._reads(row, row.table[depth][before], before, depth)
        uses.update(row.table[depth][: position + 1])
        row.depth += 1
        loops = row.forced_depth(position)
        if loops is None:
            loops = exit_depth(row.hashes[position], position - row.prompt_len, row.params)
        if row.depth == loops:
            row.exits[position] = loops
            for deeper in range(loops, self.loops):
                row.table[deeper][position] = row.table[loops - 1][position]
            row.state = "coda"

    def _coda(self, row: FakeRow, number: int, events: list[tuple]) -> None:
        if not row.replays and self.rng.random() < self.error_rate:
            events.append((number, row.epoch, row.position, 0, row.depth, FinishReason.ERROR))
            row.state = "done"
            return
        token = next_token(row.hashes[row.position])
        if row.replays:
            token = row.forced_ids[row.position - row.prompt_len + 1]
        elif row.mask is not None:
            bits = int.from_bytes(row.mask.bits, "little")
            token = allowed_token(token, {i for i in range(VOCAB) if bits >> i & 1})
        row.hashes.append(extend_hash(row.hashes[row.position], token))
        row.tokens.append(token)
        count = len(row.tokens) - row.prompt_len
        reason = FinishReason.NONE
        if count == row.params.max_new_tokens:
            reason = FinishReason.LENGTH
        elif token in row.params.end_ids:
            reason = FinishReason.STOP_ID
        assert reason is FinishReason.NONE or not row.replays, "a request that was over came back"
        depth = self.loops if count == 1 else row.depth
        events.append((number, row.epoch, row.position, token, depth, reason))
        row.position += 1
        row.depth = 0
        row.state = "live" if reason is FinishReason.NONE else "done"

    def retire_round(self) -> None:
        launched = self.rounds.popleft()
        self.in_use.subtract(launched.uses)
        self.retired += 1
        self.events += launched.events

    # ------------------------------------------------------------------ events

    def has_work(self) -> bool:
        return any(row.state in ("live", "coda") for row in self.rows.values())

    def weights_updated(self) -> None:
        """Other weights: nothing that a slot holds may be read by a request that is admitted later."""
        self.holds = {slot: (~prefix, depth) for slot, (prefix, depth) in self.holds.items()}

    def report(self) -> RoundEvents | None:
        """What retired since the last report; None if nothing did."""
        while self.applied and self.applied[0][1] <= self.retired:
            self.acknowledged = self.applied.popleft()[0]
        now = (self.acknowledged, self.retired, self.retired_chunk)
        if now == self.reported and not self.events:
            return None
        self.reported = now
        columns = [list(column) for column in zip(*self.events, strict=True)] or [[] for _ in range(6)]
        events = RoundEvents(*now, *columns, chunk_logprobs=self.chunk_logprobs)
        for index, (number, epoch, *_) in enumerate(self.events):
            row = self.rows[number]
            if row.epoch == epoch and row.params.logprobs:
                events.logprobs[index] = -0.5
                if row.params.top_logprobs_num:
                    events.tops[index] = TopLogprobs([-0.5], [1], [])
        self.events, self.chunk_logprobs = [], []
        return events


@dataclass
class Answer:
    """What a client has heard about one request."""

    message: GenerateReq
    started: Started | None = None
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: Finished | None = None
    aborted: bool = False
    retractions: int = 0
    stopped_at: int | None = None


class Simulation:
    """A scheduler and a fake worker with random delays in between, and everybody's books checked."""

    def __init__(
        self,
        config: SchedulerConfig,
        seed: int = 0,
        error_rate: float = 0.0,
        check_every: int = 1,
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.grammars = FakeGrammars(self.rng)
        self.scheduler = Scheduler(config, self.grammars)
        exact = config.radix_insert_generated == "never"
        self.worker = FakeWorker(config, self.rng, error_rate, exact)
        self.plans: deque[StepPlan] = deque()
        self.events: deque[RoundEvents] = deque()
        self.answers: dict[int, Answer] = {}
        self.check_every = check_every
        self.steps = 0
        self.bypassed: Counter[int] = Counter()
        # uid: place, of waiting requests without a leader
        self.queue: dict[int, tuple[int, int, int]] = {}
        self.peak_rows = 0

    def submit(self, prompt: list[int], **options: object) -> int:
        """Send a request; keywords are those of ``GenerateReq`` or else of ``RowParams``."""
        uid = len(self.answers)
        top = {k: options.pop(k) for k in list(options) if k in GenerateReq.__struct_fields__}
        options.setdefault("max_loops", self.config.total_loops)
        options.setdefault("max_new_tokens", 4)
        options["constrained"] = "grammar" in top
        message = GenerateReq(uid, prompt, RowParams(**options), **top)
        self.answers[uid] = Answer(message)
        self.scheduler.add(message)
        if message.leader is None and uid in self.scheduler.requests:
            self.queue[uid] = (-message.priority, 1, uid)
        return uid

    def pause(self, mode: str) -> None:
        """Pause generation; retracted requests stand before those that wait for their first row."""
        for request in self.scheduler.requests.values():
            if mode == "abort":
                self.answers[request.uid].aborted = True
                self.queue.pop(request.uid, None)
            elif mode == "retract" and request.state is not RequestState.WAITING:
                self.answers[request.uid].retractions += 1
                self.queue[request.uid] = (request.order[0], 0, request.arrival)
                self.bypassed[request.uid] = 0
        self.scheduler.control(ControlReq(0, ControlOp.PAUSE, {"mode": mode}), now=0.0)
        assert self.scheduler.paused

    def update_weights(self, version: str | None = None) -> ControlReply:
        """Ask for other weights; the worker loads them."""
        arguments = {"model_path": "/new", "weight_version": version}
        self.scheduler.control(ControlReq(0, ControlOp.UPDATE_WEIGHTS, arguments), now=0.0)
        assert self.scheduler.take_orders() == [UpdateWeights("/new")]
        assert self.scheduler.take_orders() == []
        self.worker.weights_updated()
        self.scheduler.weights_updated(WeightsUpdated(True, "loaded"))
        return self.scheduler.take_replies(0.0)[-1]

    def resume(self) -> None:
        self.scheduler.control(ControlReq(0, ControlOp.CONTINUE), now=0.0)

    def abort(self, uid: int) -> None:
        self.answers[uid].aborted = True
        self.queue.pop(uid, None)
        self.scheduler.abort([uid])

    def stop(self, uid: int, num_tokens: int) -> None:
        answer = self.answers[uid]
        # of two stops the earlier cut holds
        answer.stopped_at = min(num_tokens, answer.stopped_at or num_tokens)
        self.queue.pop(uid, None)
        self.scheduler.stop(uid, num_tokens)

    def step(self) -> None:
        """One iteration of the scheduler's loop."""
        while self.events:
            self.scheduler.process_events(self.events.popleft())
        plan = self.scheduler.step()
        if plan is not None:
            self._check_fairness(plan)
            self.plans.append(plan)
        batch = self.scheduler.take_output()
        if batch is not None:
            self.hear(batch)
        self.steps += 1
        if self.steps % self.check_every == 0:
            self.scheduler.check_integrity()

    def _check_fairness(self, plan: StepPlan) -> None:
        for admit in plan.admits:
            request = self.scheduler._rows[admit.row]
            assert request is not None
            self.queue.pop(request.uid, None)
            for uid, place in self.queue.items():
                if place < request.order:
                    self.bypassed[uid] += 1
                    assert self.bypassed[uid] <= self.config.max_admission_bypasses
        busy = self.config.max_rows - len(self.scheduler._free_rows)
        self.peak_rows = max(self.peak_rows, busy)

    def hear(self, batch: TokenBatch) -> None:
        """What the frontend would do with a batch, and what it relies on."""
        for started in batch.started:
            answer = self.answers[started.uid]
            assert answer.started is None
            assert answer.finished is None
            answer.started = started
        assert len(set(batch.uids)) == len(batch.uids) == len(batch.counts)
        assert sum(batch.counts) == len(batch.token_ids) == len(batch.exit_depths)
        at = 0
        for uid, count in zip(batch.uids, batch.counts, strict=True):
            answer = self.answers[uid]
            assert answer.started is not None
            assert answer.finished is None
            assert count > 0
            answer.tokens += batch.token_ids[at : at + count]
            answer.depths += batch.exit_depths[at : at + count]
            assert (uid in batch.logprobs) == answer.message.params.logprobs
            if uid in batch.logprobs:
                assert len(batch.logprobs[uid].values) == count
                answer.logprobs += batch.logprobs[uid].values
            at += count
        for finished in batch.finished:
            answer = self.answers[finished.uid]
            assert answer.finished is None, f"a second terminal message for {finished.uid}"
            assert finished.reason
            assert finished.num_tokens <= len(answer.tokens)
            answer.finished = finished
            self.queue.pop(finished.uid, None)

    def tick(self) -> None:
        """Something happens somewhere."""
        worker, rng = self.worker, self.rng
        if self.plans and rng.random() < 0.7:
            worker.apply(self.plans.popleft())
        if len(worker.rounds) < self.config.rounds_in_flight and worker.has_work() and rng.random() < 0.8:
            worker.launch_round()
        if worker.rounds and rng.random() < 0.6:
            worker.retire_round()
        if worker.chunks and rng.random() < 0.4:
            worker.retire_chunk()
        if rng.random() < 0.6:
            events = worker.report()
            if events is not None:
                self.events.append(events)
        if rng.random() < 0.7:
            self.step()

    def run_until_done(self, limit: int = 100_000) -> None:
        """Tick until every request is answered and every row has drained, then check the books."""
        for _ in range(limit):
            if self.scheduler.idle and not self.plans and not self.events:
                break
            self.tick()
        else:
            raise AssertionError(f"not done: {self.scheduler.info()}")
        self.step()
        self.check_end()

    def check_end(self) -> None:
        """Everybody answered once and rightly; every slot is free or cached."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert scheduler.idle
        assert not self.grammars.open
        assert len(scheduler.pool.allocator) + scheduler.pool.radix.cached == self.config.num_slots
        assert scheduler.pool.radix.evictable == scheduler.pool.radix.cached
        assert scheduler.pool.reserved == 0
        for answer in self.answers.values():
            self.check_answer(answer)

    def check_answer(self, answer: Answer) -> None:
        finished, message = answer.finished, answer.message
        assert finished is not None, f"request {message.uid} was never answered"
        assert finished.num_retractions == answer.retractions
        if answer.started is not None:
            assert finished.cached_tokens == answer.started.cached_tokens
        if message.grammar is not None and message.grammar.startswith("fail"):
            assert finished.reason is FinishReason.ERROR
            assert "no way on" in (finished.message or "")
            return
        tokens, depths, reason = expected_output(
            message.input_ids, message.params, self.config.total_loops, message.grammar
        )
        count = finished.num_tokens
        assert answer.tokens[:count] == tokens[:count]
        assert answer.depths[:count] == depths[:count]
        if finished.status is not None:
            assert count == 0
            assert finished.message
        elif finished.reason is FinishReason.ABORT:
            assert answer.aborted
        elif finished.reason is FinishReason.STOP_STRING:
            assert count == answer.stopped_at
        elif finished.reason is not FinishReason.ERROR:
            assert (finished.reason, count) == (reason, len(tokens))
            assert finished.matched == (tokens[-1] if reason is FinishReason.STOP_ID else None)
            self.check_prompt_logprobs(answer)

    def check_prompt_logprobs(self, answer: Answer) -> None:
        start, prompt = answer.message.prompt_logprob_start, answer.message.input_ids
        assert answer.started is not None
        found = answer.started.prompt_logprobs
        if start is None:
            assert found is None
            return
        values = [
            None if p == 0 else prompt_logprob(prefix_hash(prompt[:p]), prompt[p])
            for p in range(start, len(prompt))
        ]
        assert found is not None
        assert (found.start, found.values) == (start, values)


def make_scheduler(**changes: object) -> Scheduler:
    """A scheduler of :func:`make_config`; its grammars answer when they like."""
    return Scheduler(make_config(**changes), FakeGrammars(random.Random(0)))


def make_config(**changes: object) -> SchedulerConfig:
    """A small scheduler; keywords replace fields of :class:`SchedulerConfig`."""
    fields: dict[str, object] = {
        "total_loops": 4,
        "num_slots": 2000,
        "max_rows": 8,
        "rounds_in_flight": 2,
        "chunked_prefill_size": 16,
    }
    fields.update(changes)
    if fields.get("kv_layout") == "shared":
        fields["radix_cache"] = False
    return SchedulerConfig(**fields)  # type: ignore[arg-type]
