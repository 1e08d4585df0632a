"""What SGLang's frontend client puts on the wire, recorded from the real package.

The server promises to understand exactly this. A recording stub answers, so the expectations hold
without a model; when a new SGLang release changes its client, these tests say where.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

sgl = pytest.importorskip("sglang")

# What every gen sends for the parameters that the program does not set.
DEFAULTS: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "stop_regex": [],
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "regex": None,
    "json_schema": None,
}

PROMPT_ONLY = {"max_new_tokens": 0}


class Recorder:
    """An HTTP server that keeps every request and answers with ``answer(path, body)``."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []  # method, path, body
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[str, Any], Any] = lambda path, body: {"text": "!", "meta_info": {}}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                recorder.requests.append((self.command, self.path, body))
                recorder.headers.append(dict(self.headers))
                if self.path == "/get_model_info":
                    answer: Any = {"model_path": "ouro-tiny"}
                else:
                    answer = recorder.answer(self.path, body)
                if isinstance(body, dict) and body.get("stream"):
                    data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in answer)
                    data += b"data: [DONE]\n\n"
                else:
                    data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def generated(self) -> list[Any]:
        """Bodies sent to /generate, in order."""
        return [body for _, path, body in self.requests if path == "/generate"]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    recorder = Recorder()
    thread = threading.Thread(target=recorder.server.serve_forever, args=(0.01,))
    thread.start()
    yield recorder
    recorder.server.shutdown()
    thread.join()
    recorder.server.server_close()


@pytest.fixture
def backend(recorder: Recorder) -> Any:
    return sgl.RuntimeEndpoint(recorder.url)


def test_constructor_and_housekeeping(recorder: Recorder) -> None:
    backend = sgl.RuntimeEndpoint(recorder.url, api_key="secret")
    backend.flush_cache()
    backend.get_server_info()
    backend.cache_prefix("abc")
    assert recorder.requests == [
        ("GET", "/get_model_info", None),
        ("POST", "/flush_cache", None),
        ("GET", "/server_info", None),
        ("POST", "/generate", {"text": "abc", "sampling_params": PROMPT_ONLY}),
    ]
    assert {headers["Authorization"] for headers in recorder.headers} == {"Bearer secret"}


def test_gen(recorder: Recorder, backend: Any) -> None:
    @sgl.function
    def program(s: Any, question: str) -> None:
        s += "Q: " + question + "\nA:"
        s += sgl.gen("answer", max_tokens=16, stop="\n", temperature=0, return_logprob=True)

    recorder.answer = lambda path, body: {"text": " four", "meta_info": {"id": "x"}}
    state = program.run("2+2?", backend=backend)
    assert state["answer"] == " four"
    assert state.get_meta_info("answer") == {"id": "x"}
    assert recorder.generated() == [
        {
            "text": "Q: 2+2?\nA:",
            "sampling_params": {**DEFAULTS, "max_new_tokens": 16, "stop": "\n", "temperature": 0},
            "return_logprob": True,
        }
    ]


@pytest.mark.parametrize(("dtype", "stop"), [(int, [" ", "\n"]), (float, [" ", "\n"]), (bool, []), (str, [])])
def test_gen_with_a_type_sends_a_regex(
    recorder: Recorder, backend: Any, dtype: type, stop: list[str]
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("v", dtype=dtype)

    recorder.answer = lambda path, body: {"text": "1", "meta_info": {}}
    program.run(backend=backend).sync()
    (body,) = recorder.generated()
    assert isinstance(body["sampling_params"]["regex"], str)
    assert {**body["sampling_params"], "regex": None} == {**DEFAULTS, "stop": stop}


def test_streaming_reads_cumulative_text(recorder: Recorder, backend: Any) -> None:
    reading = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("v", max_tokens=3)
        reading.wait(60)  # of a program that has ended the client shows no variable any more

    recorder.answer = lambda path, body: [
        {"text": text, "meta_info": {"completion_tokens": count}}
        for count, text in enumerate(["", "a", "ab", "ab\U0001f600"])
    ]
    state = program.run(backend=backend, stream=True)
    pieces = state.text_iter(var_name="v")
    first = next(pieces)
    reading.set()
    assert first + "".join(pieces) == "ab\U0001f600"
    assert state.get_meta_info("v") == {"completion_tokens": 3}
    assert recorder.generated() == [
        {"text": "x", "sampling_params": {**DEFAULTS, "max_new_tokens": 3}, "stream": True}
    ]


def scored(path: str, body: Any) -> Any:
    """Three prompt tokens "x", "y", "z" and choices of one token: "b" is likely, the rest not."""
    if isinstance(body.get("text"), str):
        return {"text": "", "meta_info": {"prompt_tokens": 3}}
    if "input_ids" in body:
        return [
            {"meta_info": {"input_token_logprobs": [[-1.0, i, None] for i in ids]}}
            for ids in body["input_ids"]
        ]
    return [
        {
            "meta_info": {
                "input_token_logprobs": [
                    [-1.0, 2, "y"],
                    [-0.5, 3, "z"],
                    [-0.1 if text.endswith("b") else -5.0, ord(text[-1]), text[-1]],
                ],
                "output_token_logprobs": [],
            }
        }
        for text in body["text"]
    ]


@pytest.mark.parametrize("method", ["token_length_normalized", "unconditional_likelihood_normalized"])
def test_select(recorder: Recorder, backend: Any, method: str) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "xyz" + sgl.select("v", choices=["a", "b", "c"], choices_method=getattr(sgl, method))

    recorder.answer = scored
    state = program.run(backend=backend)
    assert state["v"] == "b"
    assert state.text() == "xyzb"
    expected: list[Any] = [
        {"text": "xyz", "sampling_params": PROMPT_ONLY},
        {
            "text": ["xyza", "xyzb", "xyzc"],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": 1,
        },
    ]
    if method == "unconditional_likelihood_normalized":
        ids = [[2, 3, ord(choice)] for choice in "abc"]
        expected.append({"input_ids": ids, "sampling_params": PROMPT_ONLY, "return_logprob": True})
    assert recorder.generated() == expected


def test_fork_commits_the_prefix_once(recorder: Recorder, backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "common "
        s.sync()  # else fork may look at the text before the client's own thread has added to it
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += f"{index}:" + sgl.gen("v", max_tokens=4)
        forks.join()
        s += " joined " + forks[0]["v"] + forks[1]["v"]

    recorder.answer = lambda path, body: {"text": body["text"][-2], "meta_info": {}}
    assert program.run(backend=backend).text() == "common  joined 01"
    commit, *gens = recorder.generated()
    assert commit == {"text": "common ", "sampling_params": PROMPT_ONLY}
    assert sorted(body["text"] for body in gens) == ["common 0:", "common 1:"]


def test_fork_of_an_empty_text_commits_nothing(recorder: Recorder, backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += ""
        forks = s.fork(2)
        forks += sgl.gen("v", max_tokens=1)
        forks.join()

    program.run(backend=backend).sync()
    assert [body["text"] for body in recorder.generated()] == ["", ""]


def test_run_batch_commits_a_long_traced_prefix(recorder: Recorder, backend: Any) -> None:
    prefix = "You answer in one word, and only in one word, whatever may be asked. "

    @sgl.function
    def program(s: Any, x: str) -> None:
        s += prefix
        s += x
        s += sgl.gen("v", max_tokens=2)

    recorder.answer = lambda path, body: {"text": body["text"][-1], "meta_info": {}}
    states = program.run_batch([{"x": "a"}, {"x": "b"}, {"x": "c"}], backend=backend)
    assert [state["v"] for state in states] == ["a", "b", "c"]
    commit, *gens = recorder.generated()
    assert commit == {"text": prefix, "sampling_params": PROMPT_ONLY}
    assert sorted(body["text"] for body in gens) == [prefix + x for x in "abc"]


# --------------------------------------------------------------------------- our own endpoint


def limits_of(recorder: Recorder, stream: bool = False, **limits: float | int) -> Any:
    """Sampling parameters of one gen through ``ouro_sgl.RuntimeEndpoint``."""
    from ouro_sgl import RuntimeEndpoint

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("hi") + sgl.assistant(sgl.gen("v", max_tokens=5, temperature=0))

    chunk = {"text": "hello", "meta_info": {}}
    recorder.answer = lambda path, body: [chunk] if stream else chunk
    backend = RuntimeEndpoint(recorder.url, **limits)
    state = program.run(backend=backend, stream=stream)
    assert state["v"] == "hello"
    (body,) = recorder.generated()
    assert body["text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    return body["sampling_params"]


@pytest.mark.parametrize("stream", [False, True])
def test_own_endpoint_sends_its_limits(recorder: Recorder, stream: bool) -> None:
    limits: dict[str, float | int] = {"exit_threshold": 0.5, "min_loops": 2, "max_loops": 3}
    expected = {**DEFAULTS, "max_new_tokens": 5, "temperature": 0, "stop": ["<|im_end|>"], **limits}
    assert limits_of(recorder, stream, **limits) == expected


def test_own_endpoint_leaves_unset_limits_to_the_server(recorder: Recorder) -> None:
    sent = limits_of(recorder, exit_threshold=0.0)
    assert sent.keys() - DEFAULTS.keys() == {"exit_threshold"}
    assert sent["exit_threshold"] == 0.0


def test_own_endpoint_keeps_a_shared_stop_list_short(recorder: Recorder) -> None:
    from ouro_sgl import RuntimeEndpoint

    stops = ["\n"]

    @sgl.function
    def program(s: Any) -> None:
        for _ in range(3):
            s += "x" + sgl.gen("v", stop=stops)

    program.run(backend=RuntimeEndpoint(recorder.url)).sync()
    assert len(stops) == 4  # what the client does to it
    assert [body["sampling_params"]["stop"] for body in recorder.generated()] == [["\n", "<|im_end|>"]] * 3


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_own_endpoint_refuses_n_before_anything_is_sent(recorder: Recorder) -> None:
    from ouro_sgl import RuntimeEndpoint

    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("v", n=3)

    state = program.run(backend=RuntimeEndpoint(recorder.url))
    with pytest.raises(ValueError, match="fork"):
        raise state.error()
    assert recorder.generated() == []
