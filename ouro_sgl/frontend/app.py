"""The HTTP application: raw ASGI routes for all that generates, in front of the FastAPI routes.

The front also does what every route needs: the API key and the limit on bodies. It reads a body whole
before anything looks at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import orjson
from fastapi.routing import APIRoute

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.manager import Call, TokenizerManager
from ouro_sgl.frontend.openai.job import Job
from ouro_sgl.frontend.openai.routes import PATHS, OpenAIRoutes, openai_error
from ouro_sgl.frontend.routes import HEALTH_ROUTES, error_body, make_routes, schema_error_body
from ouro_sgl.frontend.schema import SchemaError, decode_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Seconds until somebody listens for the client's disconnect: most answers are out before, and a task
# for each of them would be wasted.
WATCH_AFTER = 0.25
LINGER_SECONDS = 2.0  # that a client may go on sending a body which is refused already
LARGE_BODY = 1 << 18  # bytes; a conversation of that size is read beside the event loop
MAX_SEQUENCES = 4096  # prompts times samples of one call
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
# Characters that JSON leaves alone and many readers of lines take for the end of one (httpx's
# iter_lines, Python's splitlines): in UTF-8, and as JSON may write them too.
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
METHODS = {"/generate": ("POST", "PUT"), **dict.fromkeys(PATHS, ("POST",))}  # of the routes here


class ClientGone(RequestError):
    """Nobody is there to read the answer."""

    def __init__(self) -> None:
        super().__init__("the client disconnected", 499)


class Application:
    """ASGI application.

    Args:
        manager: answers the requests.
        api_key: bearer token that all but the health routes ask for; None: open.
        max_body_bytes: a longer body gets 413.

    Raises:
        ConfigError: the chat template that the settings name cannot be used.
    """

    def __init__(self, manager: TokenizerManager, api_key: str | None, max_body_bytes: int) -> None:
        self._manager = manager
        self._routes = make_routes(manager)
        self._readers = {
            (method, route.path)
            for route in self._routes.routes
            if isinstance(route, APIRoute) and route.body_field is not None
            for method in route.methods or ()
        }
        self._openai = OpenAIRoutes(manager)
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self._authorization is not None and path not in HEALTH_ROUTES:
            given = _header(scope, b"authorization") or b""
            if not hmac.compare_digest(given, self._authorization):
                await _send_json(send, 401, error_body("a valid API key is needed"))
                return
        method = scope["method"]
        allowed = METHODS.get(path)
        if allowed is not None and method not in allowed:
            headers = [(b"allow", ", ".join(allowed).encode())]
            await _send_json(send, 405, {"detail": "Method Not Allowed"}, headers)
            return
        reads = (method, path) in self._readers
        if method not in ("POST", "PUT", "PATCH") and not reads:
            await self._routes(scope, receive, send)
            return
        try:
            body = await self._read_body(scope, receive)
        except ClientGone:
            return
        except RequestError as error:
            await _refuse_body(receive, send, error)
            return
        if path == "/generate":
            await self._generate(scope, body, receive, send)
            return
        if path in PATHS:
            await self._complete(path, scope, body, receive, send)
            return
        # What reads no body, an unknown path among it, answers whatever was sent.
        if body and reads:
            # FastAPI's parser lets through what is not JSON in UTF-8, NaN and half characters among it.
            try:
                orjson.loads(body)
            except orjson.JSONDecodeError as error:
                await _send_json(send, 400, schema_error_body(f"the request body cannot be read: {error}"))
                return
        await self._routes(scope, _replay(body, receive), send)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            RequestError: status 413, it is longer than allowed.
            ClientGone: it will never be complete.
        """
        limit = self._max_body_bytes
        too_long = RequestError(f"the request body is longer than {limit} bytes", 413)
        announced = _header(scope, b"content-length")
        if announced is not None and int(announced) > limit:
            raise too_long
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_long
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _generate(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        try:
            _check_content_type(scope)
            request = decode_body(body)
        except SchemaError as error:
            await _send_json(send, 400, schema_error_body(error.message))
            return
        try:
            call = await self._manager.submit(request, max_sequences=MAX_SEQUENCES)
        except RequestError as error:
            # Streams report what was wrong with the request in the stream, but a server that cannot
            # answer at all says so in the status.
            if request.stream and error.status == 400:
                await _send_stream_error(send, error, started=False)
            else:
                await _send_json(send, error.status, error_body(error.message))
            return
        watch = _DisconnectWatch(receive, call)
        try:
            await (self._stream if request.stream else self._answer)(call, send)
        finally:
            watch.close()
            self._manager.release(call)

    async def _complete(self, path: str, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """An OpenAI route."""
        try:
            _check_content_type(scope)
            with self._manager.preparing() as since:
                job = await self._read_job(path, body)
                call = await self._manager.submit(
                    job.body, max_sequences=MAX_SEQUENCES, keep_markers=job.keep_markers, since=since
                )
        except RequestError as error:
            await _send_json(send, error.status, openai_error(error))
            return
        watch = _DisconnectWatch(receive, call)
        try:
            await (self._stream_chunks if job.stream else self._answer_job)(job, call, send)
        finally:
            watch.close()
            self._manager.release(call)

    async def _read_job(self, path: str, body: bytes) -> Job:
        now = int(time.time())
        try:
            if len(body) <= LARGE_BODY:
                return self._openai.job(path, body, now)
            return await asyncio.to_thread(self._openai.job, path, body, now)
        except SchemaError:
            raise
        except RequestError:
            self._manager.metrics.refused.inc()
            raise

    async def _answer_job(self, job: Job, call: Call, send: Send) -> None:
        try:
            answers = await call.answer()
        except ClientGone:
            return
        except RequestError as error:
            await _send_json(send, error.status, openai_error(error))
            return
        self._manager.release(call)
        await _send_json(send, 200, job.answer(answers if isinstance(answers, list) else [answers]))

    async def _stream_chunks(self, job: Job, call: Call, send: Send) -> None:
        started = False
        try:
            async for answer in call.snapshots():
                # What fails before the first token is still told by the status.
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    started = True
                chunks = job.chunks(answer)
                if chunks:
                    await send({"type": "http.response.body", "body": _events(chunks), "more_body": True})
        except ClientGone:
            return
        except RequestError as error:
            if started:
                event = _events([{"error": openai_error(error)}])
                await send({"type": "http.response.body", "body": event + DONE})
            else:
                await _send_json(send, error.status, openai_error(error))
            return
        self._manager.release(call)
        await send({"type": "http.response.body", "body": _events(job.last_chunks()) + DONE})

    async def _answer(self, call: Call, send: Send) -> None:
        try:
            answer = await call.answer()
        except ClientGone:
            return
        except RequestError as error:
            await _send_json(send, error.status, error_body(error.message))
            return
        # The request ids are free before the client can see the answer.
        self._manager.release(call)
        await _send_json(send, 200, answer)

    async def _stream(self, call: Call, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for answer in call.snapshots():
                await send({"type": "http.response.body", "body": _event(answer), "more_body": True})
        except ClientGone:
            return
        except RequestError as error:
            await _send_stream_error(send, error, started=True)
            return
        self._manager.release(call)
        await send({"type": "http.response.body", "body": DONE})


class _DisconnectWatch:
    """Ends a call whose client is gone."""

    def __init__(self, receive: Receive, call: Call) -> None:
        self._receive = receive
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(WATCH_AFTER, self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._call.fail(ClientGone())

    def close(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def _check_content_type(scope: Scope) -> None:
    """JSON must be announced as such, or not at all.

    Raises:
        SchemaError: the body is announced as something else.
    """
    content_type = _header(scope, b"content-type")
    if content_type is None:
        return
    kind = content_type.split(b";", 1)[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise SchemaError(f"content-type must be application/json, not {kind.decode('latin-1')}")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that hands out ``body`` first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _send_json(
    send: Send, status: int, payload: Any, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    body = orjson.dumps(payload)
    headers = [
        *headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse_body(receive: Receive, send: Send, error: RequestError) -> None:
    """Answer while the body is still on its way, and read on.

    Most clients read nothing before they have sent all. A connection that is closed on them breaks, and
    with it they lose the answer.
    """
    body = orjson.dumps(error_body(error.message))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


def _event(payload: dict[str, Any]) -> bytes:
    """A server-sent event: one line of JSON."""
    data = orjson.dumps(payload)
    if not data.isascii():
        for character, escape in LINE_ENDS:
            data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"


def _events(payloads: list[dict[str, Any]]) -> bytes:
    """Server-sent events, one for each payload."""
    return b"".join([_event(payload) for payload in payloads])


async def _send_stream_error(send: Send, error: RequestError, *, started: bool) -> None:
    if not started:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    await send({"type": "http.response.body", "body": _event(error_body(error.message)) + DONE})
