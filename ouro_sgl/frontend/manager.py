"""The core of the frontend, without HTTP: requests out to the scheduler, answers back.

Used by the HTTP server and by ``ouro_sgl.Engine``. Everything runs on one asyncio event loop; nothing
here is thread-safe. A client call becomes one :class:`Call` of one or more sequences. Every sequence
that was sent gets exactly one terminal message, and every call ends: with an answer, or with an error
when the scheduler is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import zmq

from ouro_sgl.config import EXIT_MODES, ServerArgs
from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.exit_traces import load_traces, save_traces
from ouro_sgl.frontend.grammar import Grammar, GrammarTrial
from ouro_sgl.frontend.metrics import Metrics
from ouro_sgl.frontend.sampling import Limits, mix_seed
from ouro_sgl.frontend.schema import Expanded, GenerateBody, Prompt, convert_body, expand
from ouro_sgl.frontend.sequence import Sequence, SequenceLogprobs
from ouro_sgl.frontend.tokenizer import Tokenizer
from ouro_sgl.ipc import Edge, Receiver, Sender
from ouro_sgl.messages import (
    INITIAL_WEIGHT_VERSION,
    AbortReq,
    ControlOp,
    ControlReply,
    ControlReq,
    Finished,
    FinishReason,
    GenerateReq,
    OutputLogprobs,
    SampleReq,
    SchedulerMessage,
    SchedulerReady,
    ShutdownReq,
    StopReq,
    TokenBatch,
)
from ouro_sgl.models.config import OuroConfig, load_config

log = logging.getLogger(__name__)

# Characters in a call that are tokenized beside the event loop, so that other streams go on.
LONG_TEXT = 16384

# Seconds that a health probe waits for its own token before those of other requests count too.
PROBE_PATIENCE = 1.0

# Log-probabilities of a call beside those of its tokens. The processes hold some 200 bytes for each.
MAX_LOGPROBS = 1 << 24


class Call:
    """One client call: its sequences, and who waits for them.

    ``changed`` is awaited by one task. Between two awaits any number of updates collapse into one:
    a slow reader sees the newest state only.
    """

    def __init__(self, sequences: list[Sequence], stream: bool, many: bool, names: list[str]) -> None:
        self.sequences = sequences
        self.names = names  # request ids that are taken while the call is open
        self.many = many
        self.unfinished = len(sequences)
        self.error: RequestError | None = None
        self._stream = stream
        self._dirty: dict[int, Sequence] = {}  # by index: sequences with something to show
        self._waiter: asyncio.Future[None] | None = None

    def update(self, sequence: Sequence) -> None:
        """A streaming call has new tokens of ``sequence``; wakes the reader if a chunk is due."""
        if not self._stream:
            return
        count = len(sequence.output_ids)
        if count - sequence.shown_tokens >= sequence.stream_interval or not sequence.shown_tokens:
            self._dirty[sequence.index] = sequence
            self.wake()

    def end(self, sequence: Sequence) -> None:
        """``sequence`` got its terminal message."""
        self.unfinished -= 1
        if sequence.error is not None:
            self.error = self.error or sequence.error
        self._dirty[sequence.index] = sequence
        if self._stream or not self.unfinished or self.error is not None:
            self.wake()

    def fail(self, error: RequestError) -> None:
        self.error = self.error or error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def answer(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer.

        Raises:
            RequestError: a sequence failed, or the scheduler is gone.
        """
        while self.unfinished and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error
        answers = [sequence.answer() for sequence in self.sequences]
        return answers if self.many else answers[0]

    async def snapshots(self) -> AsyncIterator[dict[str, Any]]:
        """Cumulative answers, as they grow; the last one of each sequence has a finish_reason.

        A snapshot shares its lists with the sequence: use it before asking for the next one.

        Raises:
            RequestError: as :meth:`answer`.
        """
        while True:
            while not self._dirty and self.unfinished and self.error is None:
                await self._wait()
            if self.error is not None:
                raise self.error
            if not self._dirty:
                return
            # One at a time: what changes while a snapshot is on its way queues up again, and what was
            # queued already is shown once, as new as it is by then.
            sequence = self._dirty.pop(next(iter(self._dirty)))
            sequence.shown_tokens = len(sequence.output_ids)
            answer = sequence.answer()
            if self.many:
                answer["index"] = sequence.index
            yield answer


class TokenizerManager:
    """Owns the tokenizer, the two sockets to the scheduler and every open call."""

    def __init__(self, args: ServerArgs, ipc_dir: Path) -> None:
        """Load the tokenizer. Sockets open with :meth:`start`.

        Args:
            args: resolved settings; ``model_path`` is a folder.
            ipc_dir: the directory of the sockets.

        Raises:
            ConfigError: the checkpoint, its tokenizer or the exit trace file cannot be used.
        """
        folder = Path(args.model_path)
        self.args = args
        self.model_name = args.served_model_name or args.model_path
        self.model: OuroConfig = load_config(folder)
        self.tokenizer = Tokenizer(Path(args.tokenizer_path or folder), self.model.vocab_size)
        self.weight_version = INITIAL_WEIGHT_VERSION  # of the weights that are served
        self.model_path = args.model_path  # where they come from
        self._grammars = GrammarTrial(Path(args.tokenizer_path or folder), self.model.vocab_size)
        self._seeds = random.Random(args.random_seed)  # None: from the system's entropy
        self.created = int(time.time())
        self.metrics = Metrics(self.model_name)
        self.ready = asyncio.Event()
        self.facts: SchedulerReady | None = None
        self.failure: str | None = None
        self.stopping = False
        self._traces = load_traces(Path(args.exit_trace), self.model.total_loops) if args.exit_trace else {}
        self._recorded: dict[str, list[int]] = {}
        self._limits: Limits | None = None
        self._ipc_dir = ipc_dir
        self._uids = itertools.count(1)
        self._control_ids = itertools.count(1)
        self._running: dict[int, tuple[Call, Sequence]] = {}  # by uid, until the terminal message
        self._names: dict[str, list[Sequence]] = {}  # request ids and group names of open calls
        # Aborts that came while calls were being tokenized: by name (None: all), when, on a clock that
        # counts aborts. Empty while no call is being prepared.
        self._preparing = 0
        self._abort_clock = 0
        self._early_aborts: dict[str | None, int] = {}
        self._calls: set[Call] = set()  # open: somebody waits for the answer
        self._probes: set[int] = set()  # uids of health probes, which are not counted
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._probe_task: asyncio.Task[bool] | None = None
        self._progress = asyncio.Event()  # something was computed since a probe began, or all is over
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Open the sockets on the running event loop. :attr:`ready` is set when the scheduler is."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[Any] = zmq.Context()
        self._sender = Sender(self._context, Edge.FRONTEND_TO_SCHEDULER, self._ipc_dir, bind=False)
        self._receiver: Receiver[SchedulerMessage] = Receiver(
            self._context, Edge.SCHEDULER_TO_FRONTEND, self._ipc_dir, bind=False
        )
        self._descriptor = self._receiver.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self._receive)
        # The descriptor is edge-triggered: what arrived before add_reader would go unseen.
        self._loop.call_soon(self._receive)

    async def drain(self, timeout: float, hurry: asyncio.Event) -> None:
        """Refuse new calls, let open ones finish, abort the rest.

        Args:
            timeout: seconds that open calls get.
            hurry: set to abort them at once.
        """
        self.stopping = True
        if self._calls and not hurry.is_set():
            log.info(
                "shutting down: open calls (%d) get up to %g s, a second signal ends them at once",
                len(self._calls),
                timeout,
            )
        deadline = self._loop.time() + timeout
        while self._calls and self._loop.time() < deadline and not hurry.is_set() and self.failure is None:
            await asyncio.sleep(0.02)
        self.abort(abort_all=True)
        deadline = self._loop.time() + 1.0
        while self._calls and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._fail_calls("the server is shutting down")

    def close(self) -> None:
        """Tell the scheduler to leave, close the sockets, write the recorded exit depths.

        Raises:
            OSError: the record cannot be written.
        """
        self.stopping = True
        self._fail_calls("the server is shutting down")
        self._loop.remove_reader(self._descriptor)
        with contextlib.suppress(zmq.Again):  # a scheduler that is not there has nothing to leave
            self._sender.send(ShutdownReq())
        self._sender.close()
        self._receiver.close()
        self._context.term()
        self._long_texts.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
        if self.args.record_exit_trace:
            save_traces(Path(self.args.record_exit_trace), self._recorded)

    def fail(self, message: str) -> None:
        """A process of the server is gone: end every open call, refuse new ones."""
        if self.failure is None:
            self.failure = message
            self._fail_calls(message)

    def _fail_calls(self, message: str) -> None:
        self._progress.set()
        for call in list(self._calls):
            call.fail(RequestError(message, 503))
        for reply in self._controls.values():
            if not reply.done():
                reply.set_exception(RequestError(message, 503))

    def limits(self) -> Limits:
        """What requests are checked against.

        Raises:
            RequestError: status 503, the server is starting, stopping or broken.
        """
        if self.failure is not None:
            raise RequestError(self.failure, 503)
        if self.stopping:
            raise RequestError("the server is shutting down", 503)
        if self._limits is None:
            raise RequestError("the server is starting", 503)
        return self._limits

    # ------------------------------------------------------------------ calls

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer to a ``/generate`` request; a list for a batch or n > 1. Cancelling it aborts.

        Raises:
            RequestError: the request is refused or failed; nothing of it runs any more.
        """
        call = await self.submit(convert_body({**payload, "stream": False}))
        try:
            return await call.answer()
        finally:
            self.release(call)

    async def stream(self, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Cumulative answers to a ``/generate`` request. Closing the iterator aborts.

        With a batch or n > 1 each answer carries ``index``.

        Raises:
            RequestError: as :meth:`generate`.
        """
        call = await self.submit(convert_body({**payload, "stream": True}))
        try:
            async for answer in call.snapshots():
                meta = dict(answer["meta_info"], exit_depths=list(answer["meta_info"]["exit_depths"]))
                yield {**answer, "output_ids": list(answer["output_ids"]), "meta_info": meta}
        finally:
            self.release(call)

    async def submit(
        self,
        body: GenerateBody,
        *,
        max_sequences: int | None = None,
        keep_markers: bool = False,
        probe: bool = False,
        since: int | None = None,
    ) -> Call:
        """Check a request and send it to the scheduler. The caller must :meth:`release` the call.

        Args:
            max_sequences: prompts times samples; None: any number.
            keep_markers: texts show the markers of a chat answer, see :meth:`Tokenizer.detokenizer`.
            probe: a health check, which no counter shows.
            since: what :meth:`preparing` gave, if the call came before it is submitted.

        Raises:
            RequestError: the request is refused; nothing was sent.
        """
        with self.preparing() as now:
            try:
                limits = self.limits()
                expanded = expand(body, limits, max_sequences)
                grammars = await self._translate_grammars(expanded.prompts)
                await self._tokenize(expanded.prompts, limits)
                # From here on nothing awaits: ids are checked and taken, and all is sent, at once.
                call, requests = self._make_call(body, expanded, grammars, keep_markers)
            except RequestError:
                self.metrics.refused.inc()
                raise
            started = now if since is None else since
            early = {name for name, clock in self._early_aborts.items() if clock > started}
        self._calls.add(call)
        for name in call.names:
            self._names[name] = []
        for sequence, request in zip(call.sequences, requests, strict=True):
            self._names[sequence.rid] = [sequence]
            self._running[sequence.uid] = (call, sequence)
            self._send(request)
        for name, members in expanded.groups.items():
            self._names[name] = [call.sequences[index] for index in members]
        if probe:
            self._probes.update(sequence.uid for sequence in call.sequences)
        if None in early:
            self._abort(call.sequences)
        for aborted in set(call.names) & early:
            self._abort(self._names[aborted])
        return call

    @contextlib.contextmanager
    def preparing(self) -> Iterator[int]:
        """A call has come and is not sent yet. An abort from now on reaches it, see :meth:`submit`."""
        self._preparing += 1
        try:
            yield self._abort_clock
        finally:
            self._preparing -= 1
            if not self._preparing:
                self._early_aborts.clear()

    def release(self, call: Call) -> None:
        """Nobody waits for ``call`` any more: free its request ids, abort what still runs."""
        if call not in self._calls:
            return
        self._calls.discard(call)
        for name in call.names:
            del self._names[name]
        if call.unfinished:
            self._abort(call.sequences)

    def abort(self, rid: str | None = None, *, abort_all: bool = False) -> None:
        """End the sequences named exactly ``rid``, or all, those of calls that are still being tokenized
        too. An unknown id is ignored."""
        if self._preparing and (abort_all or rid is not None):
            self._abort_clock += 1
            self._early_aborts[None if abort_all else rid] = self._abort_clock
        if abort_all:
            self._abort([sequence for _, sequence in self._running.values()])
        elif rid is not None:
            self._abort(self._names.get(rid, []))

    def _abort(self, sequences: list[Sequence]) -> None:
        uids = [sequence.uid for sequence in sequences if not sequence.finished]
        if uids and self.stopping:
            self._send(AbortReq(uids, "Aborted: the server is shutting down"))
        elif uids:
            self._send(AbortReq(uids))

    async def _translate_grammars(self, prompts: list[Prompt]) -> dict[Grammar, str]:
        """What the scheduler is to be told of the grammars of a call."""
        wanted = {prompt.sampling.grammar for prompt in prompts}
        if wanted == {None}:
            return {}
        translated = {
            grammar: await self._grammars.translate(grammar) for grammar in wanted if grammar is not None
        }
        self.limits()  # the server may have stopped meanwhile
        return translated

    async def _tokenize(self, prompts: list[Prompt], limits: Limits) -> None:
        texts = [prompt for prompt in prompts if prompt.text is not None]
        size = 0
        for prompt in texts:
            assert prompt.text is not None
            size += len(prompt.text)
            longest = self.tokenizer.longest_token
            if longest is not None and len(prompt.text) >= limits.served_length * longest:
                raise RequestError(
                    f"the prompt of {len(prompt.text)} characters has more than the "
                    f"{limits.served_length} tokens of the context"
                )

        def encode() -> None:
            for prompt in texts:
                assert prompt.text is not None
                prompt.ids = self.tokenizer.encode(prompt.text)

        if size > LONG_TEXT:
            await self._loop.run_in_executor(self._long_texts, encode)
            self.limits()  # the server may have stopped meanwhile
        else:
            encode()

    def _make_call(
        self, body: GenerateBody, expanded: Expanded, grammars: dict[Grammar, str], keep_markers: bool
    ) -> tuple[Call, list[GenerateReq | SampleReq]]:
        samples = expanded.samples
        rids = expanded.rids
        if rids is None:
            rids = [secrets.token_hex(16) for _ in range(len(expanded.prompts) * samples)]
        names = [*rids, *expanded.groups]
        for name in names:
            if name in self._names:
                raise RequestError(f"rid {name!r} is in use by a request that still runs")
        if len(set(names)) != len(names):
            raise RequestError("the request ids of this call are not unique")
        sequences: list[Sequence] = []
        requests: list[GenerateReq | SampleReq] = []
        texts = self.tokenizer if body.return_text_in_logprobs else None
        values = 0  # log-probabilities beside the tokens' own
        for prompt in expanded.prompts:
            if not prompt.ids:
                raise RequestError("the prompt is empty")
            if prompt.logprob_start is not None and prompt.logprob_start > len(prompt.ids):
                raise RequestError(
                    f"logprob_start_len {prompt.logprob_start} is more than the prompt's "
                    f"{len(prompt.ids)} tokens"
                )
            seed = prompt.sampling.new_seed(self._seeds)
            written = prompt.sampling.grammar
            grammar = None if written is None else grammars[written]
            for sample in range(samples):
                params = prompt.sampling.row_params(
                    len(prompt.ids),
                    mix_seed(seed, sample),
                    logprobs=prompt.logprobs,
                    top_logprobs_num=prompt.top_logprobs_num,
                    token_ids_logprob=prompt.token_ids_logprob,
                    exit_lambdas=bool(body.return_exit_logprobs),
                )
                scored = 0 if prompt.logprob_start is None else len(prompt.ids) - prompt.logprob_start
                values += (scored + params.max_new_tokens) * (
                    params.top_logprobs_num + len(params.token_ids_logprob)
                )
                if values > MAX_LOGPROBS:
                    raise RequestError(
                        f"top_logprobs_num and token_ids_logprob ask for more than {MAX_LOGPROBS} values in "
                        "all: ask for fewer of them, of tokens or of samples"
                    )
                index = len(sequences)
                uid = next(self._uids)
                sequences.append(
                    Sequence(
                        uid,
                        rids[index],
                        index,
                        prompt.ids,
                        params,
                        prompt.sampling,
                        self.tokenizer,
                        SequenceLogprobs(texts, params) if prompt.logprobs else None,
                        bool(body.return_prompt_token_ids),
                        keep_markers,
                        self.weight_version,
                    )
                )
                if sample:
                    requests.append(SampleReq(uid, params.seed))
                    continue
                requests.append(
                    GenerateReq(
                        uid=uid,
                        input_ids=prompt.ids,
                        params=params,
                        prompt_logprob_start=prompt.logprob_start,
                        extra_key=prompt.extra_key,
                        priority=body.priority or 0,
                        grammar=grammar if params.max_new_tokens else None,
                    )
                )
        return Call(sequences, bool(body.stream), expanded.many, names), requests

    # ------------------------------------------------------------------ questions to the scheduler

    async def flush_cache(self) -> ControlReply:
        """Empty the radix cache; ``ok`` is false while anything runs or waits.

        Raises:
            RequestError: the scheduler is not there.
        """
        return await self._control(ControlOp.FLUSH_CACHE)

    async def scheduler_info(self) -> dict[str, Any]:
        """Statistics of the scheduler.

        Raises:
            RequestError: the scheduler is not there.
        """
        return (await self._control(ControlOp.INFO)).info

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop generating. New requests wait.

        Args:
            mode: what becomes of running requests, as in :class:`ControlOp`.

        Raises:
            RequestError: the scheduler is not there.
        """
        await self._control(ControlOp.PAUSE, {"mode": mode})

    async def resume(self) -> None:
        """Undo :meth:`pause`.

        Raises:
            RequestError: the scheduler is not there.
        """
        await self._control(ControlOp.CONTINUE)

    async def update_weights(self, model_path: str, weight_version: str | None) -> ControlReply:
        """Serve the weights in another folder; ``ok`` is false if the old ones go on serving.

        Args:
            weight_version: their name; None: the number of the update.

        Raises:
            RequestError: the scheduler is not there.
        """
        arguments = {"model_path": model_path, "weight_version": weight_version}
        reply = await self._control(ControlOp.UPDATE_WEIGHTS, arguments)
        if reply.ok:
            self.weight_version = reply.info["weight_version"]
            self.model_path = model_path
        return reply

    async def profile(self, folder: str | None) -> ControlReply:
        """Begin a profile of the worker, to be written into ``folder``; with None end it and write it. ``ok``
        is false, with the reason, if that could not be done.

        Raises:
            RequestError: the scheduler is not there.
        """
        return await self._control(ControlOp.PROFILE, {"folder": folder})

    async def _control(self, op: ControlOp, arguments: dict[str, Any] | None = None) -> ControlReply:
        self.limits()
        control_id = next(self._control_ids)
        reply: asyncio.Future[ControlReply] = self._loop.create_future()
        self._controls[control_id] = reply
        try:
            self._send(ControlReq(control_id, op, arguments or {}))
            return await reply
        finally:
            del self._controls[control_id]

    async def probe(self, timeout: float) -> bool:
        """Whether a real one-token request is answered in time. Probes at once share one request.

        Where all rows are taken or the queue is full, whether the other requests go on.
        """
        if self._probe_task is None or self._probe_task.done():
            self._probe_task = self._loop.create_task(self._run_probe(timeout))
        return await asyncio.shield(self._probe_task)

    async def _run_probe(self, timeout: float) -> bool:
        params: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0}
        if self.args.exit_mode == "trace":
            params["exit_trace"] = [self.model.total_loops]
        body = GenerateBody(input_ids=[0], sampling_params=params)
        self._progress.clear()
        deadline = self._loop.time() + timeout
        while True:
            try:
                call = await self.submit(body, probe=True)
            except RequestError:
                return False
            try:
                async with asyncio.timeout_at(min(self._loop.time() + PROBE_PATIENCE, deadline)):
                    answer = await call.answer()
                assert isinstance(answer, dict)
                if answer["meta_info"]["finish_reason"]["type"] != "abort":
                    return True
                # Somebody ended all requests, which says nothing about the worker: ask again.
            except (RequestError, TimeoutError) as error:
                if isinstance(error, RequestError) and error.status != 503:
                    return False  # it ran and failed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await self._progress.wait()
                return self._progress.is_set() and self.failure is None and not self.stopping
            finally:
                self.release(call)

    # ------------------------------------------------------------------ messages

    def _send(self, message: Any) -> None:
        try:
            self._sender.send(message)
        except zmq.Again:
            self.fail("the scheduler process is gone")

    def _receive(self) -> None:
        """Handle all messages that are here; the descriptor only signals that new ones came."""
        try:
            for message in self._receiver.drain():
                self._handle(message)
        except Exception as error:
            # A message that cannot be handled may have held somebody's terminal word: nobody may wait
            # for it.
            log.exception("a message of the scheduler could not be handled")
            self.fail(f"internal error in the frontend: {error!r}")

    def _handle(self, message: SchedulerMessage) -> None:
        if isinstance(message, TokenBatch):
            self._handle_batch(message)
        elif isinstance(message, ControlReply):
            reply = self._controls.get(message.control_id)
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif isinstance(message, SchedulerReady):
            self._handle_ready(message)
        else:
            self.fail(message.message)

    def _handle_ready(self, facts: SchedulerReady) -> None:
        args = self.args
        threshold = args.default_exit_threshold
        self.facts = facts
        self._limits = Limits(
            total_loops=facts.total_loops,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            served_length=facts.served_length,
            has_lookahead=facts.has_lookahead,
            end_ids=self.model.end_ids,
            exit_mode=EXIT_MODES[args.exit_mode],
            exit_threshold=self.model.early_exit_threshold if threshold is None else threshold,
            min_loops=args.default_min_loops or 1,
            max_loops=args.default_max_loops or facts.total_loops,
            traces=self._traces,
        )
        self.ready.set()

    def _handle_batch(self, batch: TokenBatch) -> None:
        running = self._running
        if batch.uids or batch.started:
            self._progress.set()
        for started in batch.started:
            entry = running.get(started.uid)
            if entry is not None:
                entry[1].start(started.cached_tokens, started.prompt_logprobs, started.weight_versions)
        position = 0
        logprobs: OutputLogprobs | None = None
        for uid, count in zip(batch.uids, batch.counts, strict=True):
            end = position + count
            entry = running.get(uid)
            if entry is not None:
                call, sequence = entry
                if batch.logprobs:
                    logprobs = batch.logprobs.get(uid)
                ids, depths = batch.token_ids[position:end], batch.exit_depths[position:end]
                try:
                    stopped = sequence.add(ids, depths, logprobs, batch.exit_lambdas.get(uid))
                except RequestError as error:
                    call.fail(error)  # whoever waits for it releases it, which aborts what still runs
                else:
                    if stopped is not None:
                        self._send(StopReq(uid, stopped))
                    call.update(sequence)
            position = end
        for finished in batch.finished:
            entry = running.pop(finished.uid, None)
            if entry is not None:
                self._end(*entry, finished)

    def _end(self, call: Call, sequence: Sequence, message: Finished) -> None:
        sequence.finish(message)
        call.end(sequence)
        if message.uid in self._probes:
            self._probes.discard(message.uid)
            return
        metrics = self.metrics
        if message.status is not None:
            metrics.refused.inc()
            return
        metrics.requests.inc()
        if sequence.error is not None:
            metrics.failed.inc()
        else:
            metrics.prompt_tokens.inc(sequence.prompt_tokens)
            metrics.cached_tokens.inc(sequence.cached_tokens)
            metrics.generation_tokens.inc(len(sequence.output_ids))
            metrics.generation_loops.inc(sum(sequence.exit_depths))
            if message.reason == FinishReason.ABORT:
                metrics.aborted.inc()
            if self.args.record_exit_trace:
                self._recorded[sequence.rid] = sequence.exit_depths
