"""What the tests of reported behaviours share: the models they ask, and how they ask.

- :data:`CHAIN` is the script model: every greedy answer is known. Any other token has a uniform
  distribution after it, whose greedy choice is id 0, an end token.
- :class:`Client` is one server and its HTTP connections. :meth:`Client.stream` reads a stream in the
  background, so that a test can do something else to the server meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx

from tests.models import byte_ids, byte_tokenizer, chain_of
from tests.server import Server, children_of

NATIVE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
END, TURN_START, TURN_END = 0, 1, 2  # special tokens; 0 and 2 end an answer

# --------------------------------------------------------------------------- the script model

SCRIPT_TOKENIZER = byte_tokenizer(("Paris",))
PARIS = SCRIPT_TOKENIZER.token_to_id("Paris")
SCRIPT_VOCAB = SCRIPT_TOKENIZER.get_vocab_size()
DIGITS = "567890"  # after "0" comes "5" again, without end
LETTERS = "ıé"  # the same with characters of two bytes
CHAT_ANSWER = "Hi"  # to whatever was asked

# Prompt (its last token counts) and answer.
CHAIN: dict[int, int | list[int]] = {
    **{token: [] for token in range(SCRIPT_VOCAB)},
    **chain_of(
        [*byte_ids("x😀k"), TURN_END],
        [*byte_ids("sabcDEFg"), END],
        [*byte_ids("q"), PARIS, TURN_END],
        [*byte_ids("w."), TURN_END],
        [*byte_ids("1234"), END],
        byte_ids("ll"),
        byte_ids(DIGITS + DIGITS[0]),
        byte_ids(LETTERS + LETTERS[0])[1:],
        [*byte_ids("\n" + CHAT_ANSWER), TURN_END],
        [TURN_START, TURN_START],
    ),
    # Exact ties, of which the lowest id wins: an end, else the other end, else "y", else "z" again.
    byte_ids("z")[0]: [END, TURN_END, *byte_ids("yz")],
}
LONG = "5"  # a prompt whose answer never ends


def letters(count: int) -> str:
    """The first ``count`` characters of the greedy answer to the last letter of :data:`LETTERS`."""
    return "".join(itertools.islice(itertools.cycle(LETTERS), count))


def digits(count: int) -> str:
    """The first ``count`` characters of the greedy answer to :data:`LONG`."""
    return "".join(itertools.islice(itertools.cycle(DIGITS[1:] + DIGITS[0]), count))


def greedy(max_new_tokens: int, **others: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy request."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, **others}


def message(text: str = "hi") -> list[dict[str, str]]:
    """Messages of a chat."""
    return [{"role": "user", "content": text}]


# --------------------------------------------------------------------------- asking


def wait_for(condition: Callable[[], bool], seconds: float = 100.0) -> bool:
    """Whether ``condition`` comes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def strict_json(body: bytes | str) -> Any:
    """JSON without NaN and infinity, which Python would accept."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(body, parse_constant=refuse)


class Stream:
    """A streaming request that is read in the background.

    ``chunks`` grows by one object per event, ``times`` beside it holds their monotonic arrival
    times in seconds, ``done`` tells whether ``data: [DONE]`` has come and nothing after it.
    """

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.chunks: list[Any] = []
        self.times: list[float] = []
        self.done = False
        self.status = 0
        self.error: Exception | None = None
        self._closing = threading.Event()
        self._request = (url + path, {**body, "stream": True})
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        url, body = self._request
        try:
            with (
                httpx.Client(timeout=200.0, trust_env=False) as client,
                client.stream("POST", url, json=body) as response,
            ):
                self.status = response.status_code
                if self.status != 200:
                    self._add(strict_json(response.read()))
                    return
                for line in response.iter_lines():
                    if self._closing.is_set():
                        return
                    if line:
                        self._take(line)
        except Exception as error:
            self.error = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _take(self, line: str) -> None:
        assert line.startswith("data: "), line
        assert not self.done, "an event after [DONE]"
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
        else:
            self._add(strict_json(data))

    def _add(self, chunk: Any) -> None:
        with self._changed:
            self.times.append(time.monotonic())
            self.chunks.append(chunk)
            self._changed.notify_all()

    def wait_chunks(self, count: int = 1, timeout: float = 100.0) -> Self:
        """Wait until ``count`` events have come.

        Raises:
            AssertionError: they do not come in time, or the stream ended before.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self.chunks) >= count or not self.running, timeout)
        assert len(self.chunks) >= count, (self.status, self.chunks, self.error)
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Hang up, as a client that goes away; the connection closes with its next event."""
        self._closing.set()
        self._thread.join(200)
        assert not self.running

    def finish(self, timeout: float = 200.0) -> list[Any]:
        """All events, once the stream has ended as it should.

        Raises:
            AssertionError: it does not end in time, or ends without ``[DONE]``.
        """
        self._thread.join(timeout)
        assert not self.running, f"the stream still runs after {timeout} s"
        if self.error is not None:
            raise self.error
        assert self.done or self.status != 200, "the stream ended without [DONE]"
        return self.chunks

    def text(self, timeout: float = 200.0) -> str:
        """The whole text of a ``/generate`` stream with one answer; checks that it only grew."""
        texts = [chunk["text"] for chunk in self.finish(timeout)]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts)), texts
        return texts[-1]

    def deltas(self, index: int = 0, timeout: float = 200.0) -> list[str]:
        """The pieces of one choice of an OpenAI stream, empty ones left out."""
        choices = [c for chunk in self.finish(timeout) for c in chunk["choices"] if c["index"] == index]
        pieces = [c["text"] if "text" in c else c["delta"].get("content") for c in choices]
        return [piece for piece in pieces if piece]


class Client:
    """One server, asked over HTTP."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http = httpx.Client(
            base_url=server.url, timeout=200.0, trust_env=False, limits=httpx.Limits(max_connections=64)
        )
        self._solo: dict[str, Any] = {}

    def close(self) -> None:
        self._http.close()

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def post_raw(self, path: str, body: bytes, content_type: str = "application/json") -> httpx.Response:
        """A body exactly as given."""
        return self._http.post(path, content=body, headers={"content-type": content_type})

    def generate(self, prompt: str | list[Any], sampling: Any = None, **fields: Any) -> Any:
        """``/generate`` that must succeed, of a text, ids, or a list of either; the answer as JSON."""
        is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
        body = {"text" if is_text else "input_ids": prompt, "sampling_params": sampling or {}, **fields}
        response = self.post(NATIVE, body)
        assert response.status_code == 200, response.text
        return strict_json(response.content)

    def solo(self, prompt: str | list[Any], sampling: Any, **fields: Any) -> Any:
        """The answer of a greedy or seeded request that runs alone; asked once, then remembered.

        Call it while nothing else runs.
        """
        key = json.dumps([prompt, sampling, fields], sort_keys=True)
        if key not in self._solo:
            assert self.is_idle()
            self._solo[key] = self.generate(prompt, sampling, **fields)
        return self._solo[key]

    def at_once(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Run ``calls`` at the same time; their results, in order."""
        with ThreadPoolExecutor(max_workers=len(calls)) as pool:
            return list(pool.map(lambda call: call(), calls))

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """Start a streaming request (``stream`` is added)."""
        return Stream(self.server.url, path, body)

    def stream_text(self, text: str, sampling: Any, **fields: Any) -> Stream:
        """Start a ``/generate`` stream of a text."""
        return self.stream(NATIVE, {"text": text, "sampling_params": sampling, **fields})

    def abort(self, **body: Any) -> httpx.Response:
        return self.post("/abort_request", body)

    def flush(self) -> bool:
        """Empty the radix cache; whether the server took it, which it does only when idle."""
        return self.post("/flush_cache", {}).status_code == 200

    def is_idle(self, seconds: float = 100.0) -> bool:
        """Whether everything ends and is given back within ``seconds``; empties the cache then."""
        return wait_for(self.flush, seconds)

    def nothing_runs(self, seconds: float = 100.0) -> bool:
        """Whether everything ends within ``seconds``; leaves the cache alone."""

        def quiet() -> bool:
            state = self.state()
            return not any(state[count] for count in ("waiting", "prefilling", "running", "draining"))

        return wait_for(quiet, seconds)

    def state(self) -> Any:
        """What the scheduler counts: ``running``, ``waiting``, ``free_slots``, ..."""
        return self.get("/server_info").json()["internal_states"][0]

    def wait_running(self, count: int = 1) -> None:
        """Until ``count`` requests have their rows.

        Raises:
            AssertionError: they do not get them in time.
        """
        assert wait_for(lambda: self.state()["running"] >= count), self.state()

    def pids(self) -> dict[str, int]:
        """Process ids by title (``ouro_sgl::frontend``, ...)."""
        main = self.server.process.pid
        found = {}
        for pid in (main, *children_of(main)):
            title = ""
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a child that has ended
                title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            if title.startswith("ouro_sgl::"):
                found[title] = pid
        return found

    @contextlib.contextmanager
    def unharmed(self, prompt: str = LONG, sampling: Any = None) -> Iterator[Stream]:
        """A long stream runs during the block; afterwards it is what it would be alone.

        The processes must be the same ones after the block, and the server must answer.
        """
        sampling = sampling or greedy(300)
        expected = self.solo(prompt, sampling)
        pids = self.pids()
        stream = self.stream_text(prompt, sampling).wait_chunks()
        try:
            yield stream
        finally:
            chunks = stream.finish()
            assert chunks[-1]["output_ids"] == expected["output_ids"]
            assert chunks[-1]["text"] == expected["text"]
        assert self.pids() == pids
        assert self.get("/health_generate").status_code == 200
