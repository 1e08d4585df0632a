"""The scheduler: memory, admission and endings of all requests. No sockets, no clock, no tensors.

It is driven from outside: messages of the frontend and events of the worker come in by method
calls, ``step`` returns the next plan for the worker and ``take_output`` what the frontend is to
hear. The same calls in the same order give the same plans.

The rules of slot safety, which the rest relies on:

* Slots leave a request only (a) when an event shows that its token left the loop above them: they
  were never written and the table already points elsewhere; (b) when an event shows that the row
  ended on the device, which then neither reads nor writes them; (c) when a row ended or retracted by
  the host has drained: its release is applied and every round and chunk launched before that has
  retired.
* The radix cache takes over slots only when the chunk that wrote them has retired.
* A request is admitted only if all slots of its life can be reserved, so no draw ever fails and a
  running request never waits for another one's memory.

A retracted request gives its row up and goes back to the queue with its output. Admitted again, its row
is told the tokens and exit depths so far and runs through them as it did before; the scheduler follows
that by the row's events and grants just what each position is known to need.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from typing import Any

from ouro_sgl.errors import IntegrityError
from ouro_sgl.kvcache.layout import LAYOUTS, Layout
from ouro_sgl.kvcache.pool import SlotPool
from ouro_sgl.kvcache.radix import Columns, Node
from ouro_sgl.messages import (
    INITIAL_WEIGHT_VERSION,
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
    Profile,
    Profiled,
    PromptLogprobs,
    Release,
    RoundEvents,
    SampleReq,
    Segment,
    Started,
    StepPlan,
    TokenBatch,
    UpdateWeights,
    WeightsUpdated,
)
from ouro_sgl.scheduler.admission import Admission, Verdict, WaitingQueue
from ouro_sgl.scheduler.config import SchedulerConfig
from ouro_sgl.scheduler.grammar import Grammars, NextTokens
from ouro_sgl.scheduler.output import OutputBuffer
from ouro_sgl.scheduler.prefill import PrefillQueue
from ouro_sgl.scheduler.request import Request, RequestState
from ouro_sgl.scheduler.stats import Stats

DRAWN_POSITIONS = 16  # of a request that slots are drawn for at once
FLUSH_PATIENCE = 1.0  # seconds that a flush waits for rows that drain
# Rows that left so do not hand their generated tokens to the cache; NONE: the request was retracted.
UNCACHED_OUTCOMES = (FinishReason.NONE, FinishReason.ABORT, FinishReason.ERROR)

logger = logging.getLogger(__name__)


class Scheduler:
    """State of all requests and all slots of one worker."""

    def __init__(self, config: SchedulerConfig, grammars: Grammars) -> None:
        self.config = config
        self.grammars = grammars
        self.layout: Layout = LAYOUTS[config.kv_layout](config.total_loops)
        self.pool = SlotPool(config.num_slots, config.total_loops)
        self.stats = Stats()
        self.requests: dict[int, Request] = {}  # by uid, those without a terminal message
        self.waiting = WaitingQueue()
        self.output = OutputBuffer()
        self._admission = Admission(
            self.waiting,
            config.admission_scan_limit,
            config.max_admission_bypasses,
            config.schedule_policy == "lpm",
        )
        self._prefill = PrefillQueue(config.chunked_prefill_size)
        self._rows: list[Request | None] = [None] * config.max_rows
        self._epochs = [0] * config.max_rows
        self._free_rows = list(range(config.max_rows))  # a heap: the lowest row first
        self._chunks: deque[tuple[int, list[tuple[Request, int]]]] = deque()  # unretired: id, (row, end)
        self._releases: list[Request] = []  # ended or retracted by the host, release not planned yet
        self._draining: list[Request] = []  # release planned
        self._hungry: dict[int, Request] = {}  # by uid, rows that may need a grant
        self._masked: dict[int, Request] = {}  # by uid, running rows whose mask is not planned yet
        self._controls: list[tuple[ControlReq, float]] = []  # with the time of arrival
        self._replies: list[ControlReply] = []
        self.paused = False
        self.weight_version = INITIAL_WEIGHT_VERSION
        self._generation = 0  # of the weights
        self._update: ControlReq | None = None  # asked of the worker, not answered yet
        self._profiles: deque[ControlReq] = deque()  # likewise
        self._orders: list[UpdateWeights | Profile] = []  # for the worker, not sent yet
        self._plan_id = 0
        self._chunk_id = 0
        self._arrivals = 0
        self._first: GenerateReq | None = None  # the newest request, of which samples may follow
        # Positions granted ahead of the running one: refilled to twice the rounds in flight before
        # the rounds that are already launched can use up what is left.
        self._grant_high = 2 * config.rounds_in_flight
        self._grant_low = 3 * config.rounds_in_flight // 2

    # ------------------------------------------------------------------ from the frontend

    def add(self, message: GenerateReq) -> None:
        """Queue a request, or refuse it at once with a terminal message that carries a status."""
        self._first = message
        self._queue(message)

    def _queue(self, message: GenerateReq) -> None:
        self.stats.requests += 1
        problem = self._problem(message)
        if problem is not None:
            self._refuse(message.uid, problem, 400)
            return
        limit = self.config.max_queued_requests
        # A request that a row can take in the next step, or as soon as the row has drained, does not count
        # as one that waits: without the latter, retracted requests would fill the queue for a moment.
        room = len(self._free_rows) + len(self._releases) + len(self._draining)
        if limit is not None and len(self.waiting) >= limit + room:
            self._refuse(message.uid, f"the queue is full: {limit} requests wait", 503)
            return
        need = self.layout.generated_need(message.params)
        request = Request(message, self._arrivals, need, self.config.total_loops)
        request.least_need = self._least_need(request)
        self._arrivals += 1
        self.requests[request.uid] = request
        if request.grammar is not None:
            self.grammars.start(request.uid, request.grammar, request.params.end_ids)
        leader = None if message.leader is None else self.requests.get(message.leader)
        if self.config.radix_cache and leader is not None and leader.state <= RequestState.PREFILL:
            self.waiting.hold(request, leader.uid)
        else:
            self.waiting.push(request)

    def add_sample(self, message: SampleReq) -> None:
        """Queue one more sample of the request that was added last; see :meth:`add`."""
        if self._first is None:
            raise IntegrityError(f"request {message.uid} is a sample of nothing")
        self._queue(message.of(self._first))

    def abort(self, uids: list[int], cause: str = "Aborted by the client") -> None:
        """End these requests; unknown and finished ones are ignored."""
        for uid in uids:
            request = self.requests.get(uid)
            if request is not None:
                untouched = request.state is RequestState.WAITING and not request.started
                moment = " before prefill" if untouched else ""
                self._end(request, FinishReason.ABORT, f"{cause}{moment}")

    def stop(self, uid: int, num_tokens: int) -> None:
        """A stop string was found: ``uid`` ends with its first ``num_tokens`` output tokens.

        Wins over a later end that was not reported yet; ignored when the end was reported.
        """
        request = self.requests.get(uid)
        if request is not None:
            if num_tokens > len(request.output_ids):
                logger.error(
                    "stop of request %d after %d tokens, it has %d", uid, num_tokens, len(request.output_ids)
                )
                num_tokens = len(request.output_ids)
            del request.output_ids[num_tokens:]
            del request.exit_depths[num_tokens:]
            self._end(request, FinishReason.STOP_STRING)
            return
        unsent = self.output.unsent_finish(uid)
        if unsent is not None and unsent.status is None and num_tokens <= unsent.num_tokens:
            unsent.reason = FinishReason.STOP_STRING
            unsent.num_tokens = num_tokens
            unsent.matched = unsent.message = None

    def control(self, message: ControlReq, now: float) -> None:
        """Note a question; :meth:`take_replies` answers it. ``now`` is in seconds of any clock."""
        if message.op is ControlOp.PAUSE:
            self._pause(message)
        elif message.op is ControlOp.CONTINUE:
            self.paused = False
            self._replies.append(ControlReply(message.control_id, True))
        elif message.op is ControlOp.UPDATE_WEIGHTS:
            self._begin_update(message)
        elif message.op is ControlOp.PROFILE:
            self._profiles.append(message)
            self._orders.append(Profile(message.arguments["folder"]))
        else:
            self._controls.append((message, now))

    def _pause(self, message: ControlReq) -> None:
        self.paused = True
        mode = message.arguments["mode"]
        for request in list(self.requests.values()):
            if mode == "abort":
                self._end(request, FinishReason.ABORT, "Aborted: generation was paused")
            elif mode == "retract" and request.state is not RequestState.WAITING:
                self._retract(request)
        self._replies.append(ControlReply(message.control_id, True))

    def _begin_update(self, message: ControlReq) -> None:
        problem = None
        if self._update is not None:
            problem = "another update of the weights is under way"
        elif self.requests and not self.paused:
            problem = f"the weights cannot be updated: {self._load()}; pause first"
        if problem is not None:
            self._replies.append(ControlReply(message.control_id, False, problem))
            return
        self._update = message
        self._orders.append(UpdateWeights(message.arguments["model_path"]))

    def take_orders(self) -> list[UpdateWeights | Profile]:
        """For the worker, to be sent after the plan of the same step."""
        orders, self._orders = self._orders, []
        return orders

    def weights_updated(self, message: WeightsUpdated) -> None:
        """The worker's answer. Nothing cached from other weights is used again."""
        asked, self._update = self._update, None
        if asked is None:
            raise IntegrityError("the worker reports an update of the weights that nobody asked for")
        info: dict[str, Any] = {"paused_requests": 0}
        if message.ok:
            self._generation += 1
            self.weight_version = asked.arguments["weight_version"] or str(self._generation)
            self.pool.flush_unlocked()
            for request in self.requests.values():
                if request.state is not RequestState.WAITING:
                    request.weight_versions.append(self.weight_version)
                    info["paused_requests"] += 1
                elif request.num_retractions:
                    info["paused_requests"] += 1
            info["weight_version"] = self.weight_version
        self._replies.append(ControlReply(asked.control_id, message.ok, message.message, info))

    def profiled(self, message: Profiled) -> None:
        """The worker's answer to the oldest order of a profile."""
        if not self._profiles:
            raise IntegrityError("the worker reports a profile that nobody asked for")
        asked = self._profiles.popleft()
        self._replies.append(ControlReply(asked.control_id, message.ok, message.message))

    def take_replies(self, now: float) -> list[ControlReply]:
        """Answers that are due: all but flushes which still wait for draining rows."""
        replies, self._replies = self._replies, []
        patient = []
        for message, since in self._controls:
            if message.op is ControlOp.INFO:
                replies.append(ControlReply(message.control_id, True, info=self.info()))
                continue
            if self.idle:
                self.pool.flush()
                replies.append(ControlReply(message.control_id, True))
            elif self.requests or now - since >= FLUSH_PATIENCE:
                replies.append(ControlReply(message.control_id, False, f"cannot flush: {self._load()}"))
            else:
                patient.append((message, since))
        self._controls = patient
        return replies

    def next_deadline(self) -> float | None:
        """When :meth:`take_replies` must be called though nothing happened; None: never."""
        return min((since + FLUSH_PATIENCE for _, since in self._controls), default=None)

    def fail_all(self, message: str) -> None:
        """Give every request its terminal message: the process ends, the worker is gone, or the books are
        wrong. Slots and rows stay as they are, and nothing but :meth:`take_output` may follow."""
        for request in list(self.requests.values()):
            self._report(request, FinishReason.ERROR, message=message)

    # ------------------------------------------------------------------ from the worker

    def process_events(self, events: RoundEvents) -> None:
        """Take in what retired on the device.

        Raises:
            IntegrityError: the events break the contract of :class:`RoundEvents`.
        """
        self.stats.count_rounds(events.round_stats)
        for part in events.chunk_logprobs:
            self._take_prompt_logprobs(part)
        while self._chunks and self._chunks[0][0] <= events.retired_chunk:
            for request, end in self._chunks.popleft()[1]:
                if end == len(request.input_ids) and request.state is RequestState.PREFILL:
                    self._finish_prompt(request)
        for index, (row, epoch) in enumerate(zip(events.rows, events.epochs, strict=True)):
            current = self._rows[row]
            # What a row that is gone, or that the host has ended, still produced is dropped.
            if current and current.epoch == epoch and current.state is not RequestState.DRAINING:
                self._take_token(current, events, index)
        if self._draining:
            self._drain(events.applied_plan, events.retired_chunk)

    def _take_token(self, request: Request, events: RoundEvents, index: int) -> None:
        position = events.positions[index]
        prompt_len = len(request.input_ids)
        expected = prompt_len - 1 + request.reached
        if request.state is not RequestState.RUNNING or position != expected:
            raise IntegrityError(
                f"event of request {request.uid} ({request.state.name}) at position {position}, "
                f"expected {expected}"
            )
        reason = events.reasons[index]
        if reason is FinishReason.ERROR:  # carries no token
            self._finish(request, reason, message="the model produced values that are not finite")
            return
        depth = events.exit_depths[index]
        if position >= prompt_len:
            slots = request.ahead.popleft()
            used = self.layout.used(depth)
            if used < len(slots):
                self.pool.give(slots[used:])
                del slots[used:]
            request.kept += slots
        if request.replaying:
            self._check_replayed(request, events.token_ids[index], depth)
            request.reached += 1
            self._hungry[request.uid] = request
            return
        request.reached += 1
        request.output_ids.append(events.token_ids[index])
        request.exit_depths.append(depth)
        self.stats.generated_tokens += 1
        self.stats.loops += depth
        if request.params.logprobs:
            request.unsent_logprobs.append(events.logprobs[index])
            if request.wants_tops:
                request.unsent_tops.append(events.tops[index])
        if request.params.exit_lambdas:
            request.unsent_lambdas.append(events.exit_lambdas[index])
        self.output.tokens(request)
        if reason is FinishReason.NONE:
            self._hungry[request.uid] = request
            if request.grammar is not None:
                self.grammars.advance(request.uid, events.token_ids[index])
        else:
            matched = events.token_ids[index] if reason is FinishReason.STOP_ID else None
            self._finish(request, reason, matched=matched)

    def _check_replayed(self, request: Request, token_id: int, depth: int) -> None:
        known = (request.output_ids[request.reached], request.exit_depths[request.reached])
        if (token_id, depth) != known:
            raise IntegrityError(
                f"output {request.reached} of request {request.uid} was replayed as token {token_id} after "
                f"{depth} loops, not as {known[0]} after {known[1]}"
            )

    def _take_prompt_logprobs(self, part: ChunkLogprobs) -> None:
        request = self._rows[part.row]
        if request is None or request.epoch != part.epoch or request.state is not RequestState.PREFILL:
            return
        first = request.prompt_logprob_start
        if first is None:
            return
        for offset, value in enumerate(part.values):
            at = part.start + offset - first
            if 0 <= at < len(request.prompt_logprobs):
                request.prompt_logprobs[at] = value
                if part.tops:
                    request.prompt_tops[at] = part.tops[offset]

    def _drain(self, applied_plan: int, retired_chunk: int) -> None:
        left = []
        for request in self._draining:
            if request.release_plan <= applied_plan and request.last_chunk <= retired_chunk:
                self._leave_row(request)
            else:
                left.append(request)
        self._draining = left

    # ------------------------------------------------------------------ plan and output

    def step(self) -> StepPlan | None:
        """The next plan, or None when the worker has nothing to be told."""
        for found in self.grammars.take():
            self._take_next_tokens(found)
        plan = StepPlan(self._plan_id + 1)
        for request in self._releases:
            request.release_plan = plan.plan_id
            plan.releases.append(Release(request.row, request.epoch))
            self._draining.append(request)
        self._releases.clear()
        if not self.paused and self._update is None:
            self._plan_work(plan)
        if not (plan.releases or plan.admits or plan.grants or plan.chunks or plan.masks):
            return None
        self._plan_id = plan.plan_id
        self.stats.plans += 1
        return plan

    def _plan_work(self, plan: StepPlan) -> None:
        if self._free_rows:
            self._admission.run(lambda r: self._match(r)[1], lambda r: self._admit(r, plan))
        while len(self._prefill) and len(self._chunks) < self.config.max_chunks_ahead:
            plan.chunks.append(self._next_chunk())
        for request in self._hungry.values():
            grant = self._grant(request)
            if grant is not None:
                plan.grants.append(grant)
        self._hungry.clear()
        for request in self._masked.values():
            found = request.next_tokens
            assert found is not None
            position = len(request.input_ids) - 1 + found.index
            plan.masks.append(Mask(request.row, request.epoch, position, found.bits))
        self._masked.clear()

    def take_output(self) -> TokenBatch | None:
        """All that the frontend is to hear of what happened since the last call."""
        return self.output.take()

    def _admit(self, request: Request, plan: StepPlan) -> Verdict:
        """Put ``request`` on a row if one is free and everything it will ever need can be promised."""
        if not self._free_rows:
            return Verdict.STOP
        available = self.pool.available
        if request.least_need > available:
            return Verdict.NO_ROOM
        prompt_len = len(request.input_ids)
        node, cached = self._match(request)
        need = self.layout.need(prompt_len, cached, request.generated_need)
        if need + self.pool.radix.lock_cost(node) > available:
            return Verdict.NO_ROOM
        limit = self.config.max_prefill_tokens
        backlog = self._prefill.backlog
        if limit is not None and backlog and backlog + prompt_len - cached > limit:
            return Verdict.STOP

        self.pool.radix.lock(node)
        self.pool.reserve(need)
        row = heapq.heappop(self._free_rows)
        self._epochs[row] += 1
        self._rows[row] = request
        request.row, request.epoch = row, self._epochs[row]
        request.state = RequestState.PREFILL
        request.generation = self._generation
        if not request.started:
            request.weight_versions = [self.weight_version]
        elif request.weight_versions[-1] != self.weight_version:
            request.weight_versions = [*request.weight_versions, self.weight_version]
        request.reserved = need
        request.node, request.tree_len = node, cached
        request.cached_len = request.planned = cached
        request.match = (None, 0)
        start = request.prompt_logprob_start
        if start is not None:
            request.prompt_logprobs = [None] * max(prompt_len - start, 0)
            if request.wants_tops:
                request.prompt_tops = [None] * len(request.prompt_logprobs)
        self._prefill.push(request)
        if not request.num_retractions:
            self.stats.prompt_tokens += prompt_len
            self.stats.cached_tokens += cached
        if not request.started:
            request.cached_tokens = cached
        plan.admits.append(
            Admit(
                row,
                request.epoch,
                request.input_ids,
                request.params,
                cached,
                [slot for column in self.pool.radix.columns(node) for slot in column],
                start,
                list(request.output_ids),
                list(request.exit_depths),
            )
        )
        return Verdict.ADMITTED

    def _match(self, request: Request) -> tuple[Node | None, int]:
        """The cached prefix of a waiting request, looked up again only when the cache changed."""
        radix = self.pool.radix
        if self.config.radix_cache and request.matched_version != radix.version:
            namespace = (self._generation, request.extra_key)
            request.match = radix.match(request.input_ids, request.match_limit, namespace)
            request.matched_version = radix.version
        return request.match

    def _next_chunk(self) -> Chunk:
        self._chunk_id += 1
        chunk = Chunk(self._chunk_id, [])
        members = []
        loops = self.config.total_loops
        for request, start, end in self._prefill.next_chunk():
            size = end - start
            slots = self.pool.draw(loops * size)
            request.reserved -= loops * size
            for depth, column in enumerate(request.prompt_slots):
                column += slots[depth * size : (depth + 1) * size]
            request.last_chunk = chunk.chunk_id
            members.append((request, end))
            chunk.segments.append(Segment(request.row, request.epoch, start, end, slots))
            if end == len(request.input_ids):
                self._hungry[request.uid] = request  # the worker makes the row live by itself
        self._chunks.append((chunk.chunk_id, members))
        self.stats.chunks += 1
        return chunk

    def _grant(self, request: Request) -> Grant | None:
        """Slots for the next positions of a row, out of its reservation.

        In the layout ``shared`` the reservation may be short until the prompt collapses; the row
        is looked at again then.
        """
        start = request.granted_until
        running = request.next_position()
        if start >= request.position_limit or start - running > self._grant_low:
            return None
        end = min(running + self._grant_high, request.position_limit)
        while request.drawn_until < end and self._draw_ahead(request):
            pass
        end = min(end, request.drawn_until)
        if start >= end:
            return None
        first = len(request.ahead) - (request.drawn_until - start)
        granted = list(itertools.islice(request.ahead, first, first + end - start))
        request.granted_until = end
        slots = [slot for position in granted for slot in position]
        return Grant(request.row, request.epoch, start, [len(position) for position in granted], slots)

    def _draw_ahead(self, request: Request) -> bool:
        """Draw slots for the positions that follow, those of a depth side by side, as they are read.

        Returns:
            Whether the reservation had any for the next one.
        """
        prompt_len = len(request.input_ids)
        start = request.drawn_until
        widths: list[int] = []
        for position in range(start, min(start + DRAWN_POSITIONS, request.position_limit)):
            width = self._width(request, position - prompt_len)
            if sum(widths) + width > request.reserved:
                break
            widths.append(width)
        if not widths:
            return False
        slots = iter(self.pool.draw(sum(widths)))
        request.reserved -= sum(widths)
        request.drawn_until += len(widths)
        drawn: list[list[int]] = [[] for _ in widths]
        for depth in range(max(widths)):
            for mine, width in zip(drawn, widths, strict=True):
                if depth < width:
                    mine.append(next(slots))
        request.ahead += drawn
        return True

    def _width(self, request: Request, index: int) -> int:
        """Slots for the position of output ``index``: what it used before, if it is replayed."""
        if index + 1 < len(request.exit_depths):
            return self.layout.used(request.exit_depths[index + 1])
        return self.layout.width(request.params, index)

    def _least_need(self, request: Request) -> int:
        """Slots of a request's whole life if the cache held all of its prompt that it may."""
        best = request.match_limit if self.config.radix_cache else 0
        return self.layout.need(len(request.input_ids), best, request.generated_need)

    # ------------------------------------------------------------------ prompts and endings

    def _finish_prompt(self, request: Request) -> None:
        """The last chunk of a prompt has retired."""
        request.state = RequestState.RUNNING
        request.prefilled = True
        if self.layout.collapses_prompt:
            self._collapse(request)
        elif self.config.radix_cache and request.generation == self._generation:
            self._cache_prompt(request)
        if not request.started:
            self._report_start(request)
        self.waiting.release(request.uid)
        if request.params.max_new_tokens == 0:
            self._finish(request, FinishReason.LENGTH)
        else:
            self._hungry[request.uid] = request
            self._use_next_tokens(request)

    def _report_start(self, request: Request) -> None:
        """Tell the client of a prompt, once."""
        prompt_logprobs = None
        start = request.prompt_logprob_start
        if start is not None:
            values = request.prompt_logprobs
            if None in (values[1:] if start == 0 else values):
                raise IntegrityError(f"prompt log-probabilities of request {request.uid} are missing")
            prompt_logprobs = PromptLogprobs(start, values, request.prompt_tops)
            request.prompt_logprob_start = None  # should it be prefilled again, nobody asks for them
        versions = list(request.weight_versions)
        self.output.start(Started(request.uid, request.cached_tokens, prompt_logprobs, versions))
        request.started = True

    def _take_next_tokens(self, found: NextTokens) -> None:
        """A request's grammar has been looked at; too late if the request has ended."""
        request = self.requests.get(found.uid)
        if request is None:
            return
        if found.error is not None:
            self._end(request, FinishReason.ERROR, f"the grammar failed: {found.error}")
            return
        request.next_tokens = found
        if request.state is RequestState.RUNNING:
            self._use_next_tokens(request)

    def _use_next_tokens(self, request: Request) -> None:
        """Send the mask of a running row with the next plan, or end it if nothing may come.

        A row that replays gets the mask for what comes behind its known output at once.
        """
        found = request.next_tokens
        if found is None or found.index < len(request.output_ids):
            return
        params = request.params
        held = found.index < params.min_new_tokens  # no end id may come yet
        if found.complete and (held or not params.end_ids):
            self._end(request, FinishReason.STOP_GRAMMAR)
        elif held and not found.allows_beside(params.end_ids):
            message = "the grammar failed: it asks for an end id that min_new_tokens does not allow yet"
            self._end(request, FinishReason.ERROR, message)
        else:
            self._masked[request.uid] = request

    def _collapse(self, request: Request) -> None:
        """Layout ``shared``: every depth of the prompt now reads the deepest slot.

        The worker changed its table before the row went live, and nothing else reads these slots.
        """
        for column in request.prompt_slots[:-1]:
            self.pool.give(column)
        request.prompt_slots = request.prompt_slots[-1:]
        left = request.generated_need - (request.drawn_until - len(request.input_ids))
        self.pool.reserve(left - request.reserved)
        request.reserved = left

    def _cache_prompt(self, request: Request) -> None:
        """Hand what the cache lacks of the prompt to it.

        If another row was first with some prefix, this row keeps its own slots of it: no table is
        rewritten under running rounds. To hold its node the row has to lock that prefix, which may
        be unlocked by now and part of what is promised to others; then nothing is cached.
        """
        radix = self.pool.radix
        tokens = request.input_ids
        namespace = (self._generation, request.extra_key)
        node, found = radix.match(tokens, len(tokens), namespace)
        if found == len(tokens) or radix.lock_cost(node) > self.pool.available:
            return
        at = found - request.cached_len
        columns = [column[at:] for column in request.prompt_slots]
        request.prompt_slots = [column[:at] for column in request.prompt_slots]
        node = radix.extend(node, tokens[found:], columns, namespace)
        radix.lock(node)
        radix.unlock(request.node)
        request.node, request.tree_len = node, len(tokens)

    def _cache_generated(self, request: Request) -> set[int]:
        """Insert prompt and output of a row that is over; returns the slots that the cache took."""
        depths = request.exit_depths
        # The last output token has no K/V, nor have those that a row which replayed did not come to.
        count = max(min(len(depths), request.reached) - 1, 0)
        if self.config.radix_insert_generated == "full_depth":
            early = (i for i in range(count) if depths[i + 1] < self.config.total_loops)
            count = next(early, count)
        columns: Columns = [[] for _ in range(self.config.total_loops)]
        if request.tree_len < len(request.input_ids):
            columns = [list(column) for column in request.prompt_slots]
        at = 0
        for depth in depths[1 : count + 1]:
            for d, column in enumerate(columns):
                column.append(request.kept[at + min(d, depth - 1)])
            at += depth
        tokens = request.input_ids + request.output_ids[:count]
        radix = self.pool.radix
        namespace = (self._generation, request.extra_key)
        node, found = radix.match(tokens, len(tokens), namespace)
        if found == len(tokens):
            return set()
        at = found - request.tree_len
        node = radix.extend(node, tokens[found:], [c[at:] for c in columns], namespace)
        return set().union(*node.columns)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        matched: int | None = None,
        message: str | None = None,
    ) -> None:
        """The row ended on the device: nothing launched uses its slots, its place is free."""
        self._report(request, reason, matched=matched, message=message)
        self._hungry.pop(request.uid, None)
        self._leave_row(request)

    def _end(self, request: Request, reason: FinishReason, message: str | None = None) -> None:
        """End a request from the host; one with a row drains first."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            request.state = RequestState.FINISHED
        else:
            self._release(request)
        self._report(request, reason, message=message)

    def _retract(self, request: Request) -> None:
        """Put a request on a row back at the queue's head; its row drains as if it had ended."""
        self._release(request)
        again = request.retracted()
        depths = enumerate(request.exit_depths[1:])
        saved = sum(self.layout.width(request.params, i) - self.layout.used(depth) for i, depth in depths)
        again.generated_need = self.layout.generated_need(request.params) - saved
        again.least_need = self._least_need(again)
        self.requests[request.uid] = again
        self.output.tokens(again)  # what was not sent yet is its own now
        self.waiting.push(again)
        self.stats.retractions += 1

    def _release(self, request: Request) -> None:
        """Let a row drain: its release goes with the next plan."""
        request.state = RequestState.DRAINING
        self._prefill.remove(request)
        self._hungry.pop(request.uid, None)
        self._masked.pop(request.uid, None)
        self._give_back_reservation(request)
        self._releases.append(request)

    def _report(
        self,
        request: Request,
        reason: FinishReason,
        *,
        matched: int | None = None,
        message: str | None = None,
    ) -> None:
        """The one terminal message of a request."""
        request.outcome = reason
        del self.requests[request.uid]
        if request.grammar is not None:
            self.grammars.forget(request.uid)
        self.waiting.release(request.uid)
        self.stats.count_finish(reason)
        self.output.finish(
            Finished(
                request.uid,
                reason,
                len(request.output_ids),
                cached_tokens=request.cached_tokens,
                num_retractions=request.num_retractions,
                matched=matched,
                message=message,
                weight_versions=request.weight_versions,
            )
        )

    def _leave_row(self, request: Request) -> None:
        """Free everything that a row holds; nothing launched can use it any more."""
        self._give_back_reservation(request)
        taken: set[int] = set()
        if self.config.radix_cache and self.config.radix_insert_generated != "never":
            # A request with output can be stopped in the midst of its prompt, if it was retracted.
            current = request.prefilled and request.generation == self._generation
            if current and request.outcome not in UNCACHED_OUTCOMES:
                taken = self._cache_generated(request)
        slots = request.owned_slots()
        self.pool.give([slot for slot in slots if slot not in taken] if taken else slots)
        self.pool.radix.unlock(request.node)
        request.node = None
        request.state = RequestState.FINISHED
        self._rows[request.row] = None
        heapq.heappush(self._free_rows, request.row)

    def _give_back_reservation(self, request: Request) -> None:
        self.pool.reserve(-request.reserved)
        request.reserved = 0

    def _problem(self, message: GenerateReq) -> str | None:
        """Why a request can never be served, or None."""
        params = message.params
        prompt_len = len(message.input_ids)
        if prompt_len == 0:
            return "the prompt is empty"
        if params.exit_trace is not None and len(params.exit_trace) < params.max_new_tokens:
            return (
                f"exit_trace has {len(params.exit_trace)} depths, max_new_tokens is {params.max_new_tokens}"
            )
        need = self.layout.need(prompt_len, 0, self.layout.generated_need(params))
        if need > self.config.num_slots:
            return (
                f"{prompt_len} prompt tokens and max_new_tokens {params.max_new_tokens} need {need} "
                f"KV slots, more than the {self.config.num_slots} that there are"
            )
        return None

    def _refuse(self, uid: int, message: str, status: int) -> None:
        self.stats.refused += 1
        self.output.finish(Finished(uid, FinishReason.ERROR, 0, message=message, status=status))

    # ------------------------------------------------------------------ looking in

    @property
    def idle(self) -> bool:
        """No request, no row and no chunk anywhere."""
        return not self.requests and len(self._free_rows) == self.config.max_rows and not self._chunks

    def _load(self) -> str:
        states = [request.state for request in self.requests.values()]
        waiting = states.count(RequestState.WAITING)
        draining = len(self._releases) + len(self._draining)
        return f"{len(states) - waiting} requests run, {waiting} wait, {draining} end"

    def info(self) -> dict[str, Any]:
        """Statistics as a JSON-able dict; tokens and requests are totals since the start."""
        states = [request.state for request in self.requests.values()]
        stats = self.stats
        return {
            "waiting": states.count(RequestState.WAITING),
            "prefilling": states.count(RequestState.PREFILL),
            "running": states.count(RequestState.RUNNING),
            "draining": len(self._releases) + len(self._draining),
            "rows": self.config.max_rows,
            "free_rows": len(self._free_rows),
            "num_slots": self.config.num_slots,
            "free_slots": len(self.pool.allocator),
            "cached_slots": self.pool.radix.cached,
            "evictable_slots": self.pool.radix.evictable,
            "reserved_slots": self.pool.reserved,
            "requests": stats.requests,
            "refused": stats.refused,
            "finished": dict(stats.finished),
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.generated_tokens,
            "mean_exit_depth": stats.mean_exit_depth,
            "plans": stats.plans,
            "chunks": stats.chunks,
            "retractions": stats.retractions,
            "paused": self.paused,
            "weight_version": self.weight_version,
            "worker": dict(stats.worker),
        }

    def check_integrity(self) -> None:
        """Every slot is exactly one of free, cached and owned; locks, promises and rows add up.

        Raises:
            IntegrityError: naming what does not hold.
        """
        on_rows = [request for request in self._rows if request is not None]
        self.pool.check(
            [slot for request in on_rows for slot in request.owned_slots()],
            [request.node for request in on_rows],
            sum(request.reserved for request in on_rows),
        )
        if sorted(self._free_rows) != [row for row, request in enumerate(self._rows) if request is None]:
            raise IntegrityError(f"free rows are {sorted(self._free_rows)}, {len(on_rows)} rows are in use")
        ending = {id(request) for request in (*self._releases, *self._draining)}
        for row, request in enumerate(self._rows):
            if request is None:
                continue
            if (request.row, request.epoch) != (row, self._epochs[row]):
                raise IntegrityError(f"request {request.uid} is not where row {row} says")
            if (request.state is RequestState.DRAINING) != (id(request) in ending):
                raise IntegrityError(f"request {request.uid} is {request.state.name} on row {row}")
            if request.state is not RequestState.DRAINING and self.requests.get(request.uid) is not request:
                raise IntegrityError(f"request {request.uid} runs though it was ended")
        running = sum(request.state is not RequestState.DRAINING for request in on_rows)
        if running + len(self.waiting) != len(self.requests):
            raise IntegrityError(
                f"{running} requests run and {len(self.waiting)} wait, {len(self.requests)} are known"
            )
