"""A model inside a Python program: the same processes as the server's, without HTTP.

The frontend's core runs on an event loop in a background thread; the calls here hand their work to
it, from any thread and any event loop. Answers are the dicts that ``/generate`` answers with.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from ouro_sgl import launch
from ouro_sgl.config import HTTP, SETTINGS, ServerArgs, nearest
from ouro_sgl.errors import ConfigError, EngineDeadError
from ouro_sgl.frontend.manager import TokenizerManager
from ouro_sgl.frontend.schema import GenerateBody
from ouro_sgl.frontend.tokenizer import Tokenizer
from ouro_sgl.models.config import OuroConfig

T = TypeVar("T")

Answer = dict[str, Any]

# Request fields that a call may set, besides those that are parameters of their own.
OPTIONS = frozenset(GenerateBody.__struct_fields__) - {"text", "input_ids", "sampling_params", "stream"}
MANY_PROMPTS = 8  # more get a progress bar on a terminal
NEVER = 1 << 30  # a stream_interval that leaves only the first and the last chunk of an answer
WATCH_SECONDS = 0.1
REASON_SECONDS = 1.0  # how long a dead child's reason may take to arrive over the socket


def _settings(model_path: str | os.PathLike[str] | None, server_args: dict[str, Any]) -> ServerArgs:
    for name in server_args:
        if name not in SETTINGS:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, SETTINGS)}")
        if SETTINGS[name][1].group == HTTP:
            raise ConfigError(f"{name} concerns the HTTP server, which an Engine does not have")
    # What the processes say is of interest to a server's owner; a program wants its terminal.
    values: dict[str, Any] = {"log_level": "warning", **server_args}
    if model_path is not None:
        values["model_path"] = os.fspath(model_path)
    return ServerArgs(**values)


class _Chunks:
    """A stream of the engine's event loop, read from elsewhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop, source: AsyncIterator[Answer]) -> None:
        self._loop = loop
        self._source = source
        self._pending: concurrent.futures.Future[Answer | None] | None = None

    async def _next(self) -> Answer | None:
        return await anext(self._source, None)

    def fetch(self) -> concurrent.futures.Future[Answer | None]:
        """The next chunk, None at the end. One at a time."""
        self._pending = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
        return self._pending

    def close(self) -> None:
        """End the stream; what still runs is aborted."""
        # Cancelling an unfinished fetch ends the stream from within; it must not be closed then.
        if self._pending is not None and not self._pending.cancel():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        await self._source.aclose()  # type: ignore[attr-defined]  # it is an async generator


class Engine:
    """Runs a looped language model; ends its processes with the block, ``shutdown`` or the program.

    Args:
        model_path: a checkpoint folder or a name on the hub; None for the bundled model.
        server_args: fields of ``ServerArgs``, but for those of the HTTP server.

    Raises:
        ConfigError: a setting or the checkpoint cannot be served.
        EngineDeadError: a process could not start; says why.
    """

    def __init__(self, model_path: str | os.PathLike[str] | None = None, **server_args: Any) -> None:
        args = launch.resolve(_settings(model_path, server_args))
        self._processes = launch.Processes(args)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ouro_sgl-engine", daemon=True)
        self._closed = False
        self._lock = threading.Lock()
        self._manager: TokenizerManager | None = None
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            manager = TokenizerManager(args, self._processes.ipc_dir)
            self._run(self._start(manager))
        except BaseException:
            self.shutdown()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._alive().tokenizer

    @property
    def model(self) -> OuroConfig:
        """Shapes and constants of the model."""
        return self._alive().model

    @property
    def served_length(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return self._alive().limits().served_length

    @property
    def args(self) -> ServerArgs:
        """The settings, with the checkpoint's folder filled in."""
        return self._alive().args

    def _alive(self) -> TokenizerManager:
        if self._manager is None or self._closed:
            raise EngineDeadError("the engine is shut down")
        return self._manager

    # ------------------------------------------------------------------ life

    async def _start(self, manager: TokenizerManager) -> None:
        manager.start()
        self._manager = manager
        self._watcher = asyncio.create_task(self._watch(manager))
        while not manager.ready.is_set():
            if manager.failure is not None:
                raise EngineDeadError(manager.failure)
            await asyncio.sleep(0.01)

    async def _watch(self, manager: TokenizerManager) -> None:
        """Ends all calls when a child has died."""
        while manager.failure is None:
            dead = self._processes.poll()
            if dead is not None:
                # The scheduler may know more than an exit code: its word goes first.
                await asyncio.sleep(REASON_SECONDS)
                manager.fail(dead)
            await asyncio.sleep(WATCH_SECONDS)

    async def _stop(self, manager: TokenizerManager) -> None:
        self._watcher.cancel()
        hurry = asyncio.Event()
        hurry.set()
        await manager.drain(0.0, hurry)
        manager.close()

    def shutdown(self) -> None:
        """Abort what runs and end the processes; calls in other threads end with an error.

        May be called twice, and is called at the end of the program.

        Raises:
            OSError: ``record_exit_trace`` names a file that cannot be written.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.shutdown)
        told = False
        try:
            if self._manager is not None:
                told = self._manager.failure is None and self._manager.ready.is_set()
                self._run(self._stop(self._manager))
        finally:
            self._processes.shutdown(timeout=5.0 if told else 0.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the engine's event loop and wait; an interrupt cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # ------------------------------------------------------------------ calls

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """Generate for one prompt or a list of them.

        Args:
            prompt: text; or give ``input_ids``.
            sampling_params: for all prompts, or one dict for each. ``exit_threshold``, ``min_loops``,
                ``max_loops`` and ``exit_mode`` decide how deep each token runs.
            stream: return an iterator of growing answers instead; leaving it early aborts.
            progress: show a bar; default: for more than 8 prompts on a terminal.
            options: other fields of ``/generate``, such as ``return_logprob`` or ``rid``.

        Returns:
            ``{"text", "output_ids", "meta_info"}``; a list of these for a list or ``n`` > 1. With
            ``stream`` an iterator, whose answers then carry ``index``.

        Raises:
            RequestError: the request is refused or failed.
            TypeError: an unknown option.
        """
        payload = _payload(prompt, input_ids, sampling_params, options)
        manager = self._alive()
        if stream:
            return self._iterate(manager, payload)
        many = _count(payload)
        if progress is None:
            progress = many > MANY_PROMPTS and sys.stderr.isatty()
        if progress:
            return self._with_progress(manager, payload, many)
        return self._run(manager.generate(payload))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """:meth:`generate` for programs with an event loop; cancelling aborts.

        With ``stream`` the result is an async iterator:
        ``async for answer in await engine.async_generate(prompt, stream=True)``.
        """
        payload = _payload(prompt, input_ids, sampling_params, options)
        manager = self._alive()
        if stream:
            return self._aiterate(manager, payload)
        work = manager.generate(payload)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def flush_cache(self) -> bool:
        """Empty the radix cache; False while anything runs."""
        return self._run(self._alive().flush_cache()).ok

    def get_server_info(self) -> dict[str, Any]:
        """Statistics of the scheduler."""
        return self._run(self._alive().scheduler_info())

    def _iterate(self, manager: TokenizerManager, payload: Answer) -> Iterator[Answer]:
        chunks = _Chunks(self._loop, manager.stream(payload))
        try:
            while (chunk := chunks.fetch().result()) is not None:
                yield chunk
        finally:
            chunks.close()

    async def _aiterate(self, manager: TokenizerManager, payload: Answer) -> AsyncIterator[Answer]:
        chunks = _Chunks(self._loop, manager.stream(payload))
        try:
            while (chunk := await asyncio.wrap_future(chunks.fetch())) is not None:
                yield chunk
        finally:
            chunks.close()

    def _with_progress(self, manager: TokenizerManager, payload: Answer, total: int) -> Any:
        from tqdm import tqdm

        payload["sampling_params"] = _with_few_chunks(payload["sampling_params"])
        answers: dict[int, Answer] = {}
        single = False
        with tqdm(total=total, unit="answer") as bar:
            for chunk in self._iterate(manager, payload):
                if chunk["meta_info"]["finish_reason"] is not None:
                    single = "index" not in chunk
                    answers[chunk.pop("index", 0)] = chunk
                    bar.update()
        return answers[0] if single else [answers[index] for index in sorted(answers)]


def _payload(prompt: Any, input_ids: Any, sampling_params: Any, options: dict[str, Any]) -> Answer:
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"unknown option {name!r}{nearest(name, OPTIONS)}")
    return {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, **options}


def _with_few_chunks(sampling_params: Any) -> Any:
    if isinstance(sampling_params, list):
        return [_with_few_chunks(params) for params in sampling_params]
    if sampling_params is None or isinstance(sampling_params, dict):
        return {**(sampling_params or {}), "stream_interval": NEVER}
    return sampling_params  # refused when it is checked


def _count(payload: Answer) -> int:
    """Answers that a request will have, as far as one can tell before it is checked."""
    prompts = payload["text"] if payload["text"] is not None else payload["input_ids"]
    is_batch = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    params = payload["sampling_params"]
    first = params[0] if isinstance(params, list) and params else params
    samples = first.get("n") if isinstance(first, dict) else None
    return (len(prompts) if is_batch else 1) * (samples if isinstance(samples, int) else 1)
