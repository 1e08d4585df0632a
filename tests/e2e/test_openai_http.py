"""The OpenAI routes over HTTP: the frontend process and the real ``openai`` client, with a mock scheduler.

The mock echoes the prompt, and the chat template is the content of the last message: an answer begins
with what the user said and ends where he wrote ``<|im_end|>``.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken

from ouro_sgl.frontend.openai import protocol
from ouro_sgl.messages import AbortReq, GenerateReq
from tests.frontend_server import VOCAB_SIZE, WORDS, Frontend, running_frontend, write_echo_checkpoint
from tests.mock_scheduler import MockScheduler
from tests.models import byte_ids, byte_tokenizer

END = "<|im_end|>"
THOUGHT = f"<think>hm</think>Yes.{END}"
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
UNICODE = "é😀👨‍👩‍👧e\u0301\u202e\x00"


@dataclass
class Served:
    client: openai.OpenAI
    http: httpx.Client
    scheduler: MockScheduler
    frontend: Frontend

    def ask(self, text: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model="echo", messages=messages, **fields)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        return self.client.completions.create(model="echo", prompt=prompt, **fields)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """Events of a complete stream; checks its frame."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *lines, last = [block for block in response.text.split("\n\n") if block]
        assert last == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokenizer = byte_tokenizer(WORDS)
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    folder = write_echo_checkpoint(tmp_path_factory.mktemp("echo"), tokenizer)
    template = folder / "last.jinja"
    template.write_text("{{ messages[-1].content }}")
    with running_frontend(folder, chat_template=str(template)) as frontend:
        scheduler = MockScheduler(frontend.ipc_dir, VOCAB_SIZE)
        scheduler.start()
        try:
            frontend.wait_healthy()
            with (
                frontend.client() as http_client,
                openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client,
            ):
                yield Served(client, http_client, scheduler, frontend)
        finally:
            scheduler.stop()


# --------------------------------------------------------------------------- what the client sends


@dataclass
class Recorder:
    """A server that keeps what a client sends and answers nothing but an error."""

    calls: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)

    def record(self, request: http.server.BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        headers = {key.lower(): value for key, value in request.headers.items()}
        self.calls.append((request.command, request.path, headers, json.loads(body) if body else None))
        request.send_response(400)
        request.send_header("content-length", "0")
        request.end_headers()


def test_what_the_client_sends() -> None:
    """The contract with the client: these bodies are what the routes have to understand."""
    recorder = Recorder()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            recorder.record(self)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        messages: Any = [{"role": "user", "content": "hi"}]
        try:
            with openai.OpenAI(base_url=url, api_key="key", max_retries=0) as client:
                for call in (
                    lambda: client.chat.completions.create(
                        model="m", messages=messages, extra_body={"exit_threshold": 0.5}
                    ),
                    lambda: client.chat.completions.create(
                        model="m", messages=messages, stream=True, stream_options={"include_usage": True}
                    ),
                    lambda: client.completions.create(model="m", prompt=[[1, 2]], max_tokens=3),
                    lambda: client.models.retrieve("a/b"),
                ):
                    with pytest.raises(openai.BadRequestError):
                        call()
        finally:
            server.shutdown()
            thread.join()
    assert [(method, path) for method, path, _, _ in recorder.calls] == [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models/a%2Fb"),
    ]
    chat, stream, completion, _ = (body for _, _, _, body in recorder.calls)
    assert chat == {"messages": messages, "model": "m", "exit_threshold": 0.5}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert stream == {"messages": messages, "model": "m", **options}
    assert completion == {"model": "m", "prompt": [[1, 2]], "max_tokens": 3}
    headers = recorder.calls[0][2]
    assert (headers["authorization"], headers["content-type"]) == ("Bearer key", "application/json")


# --------------------------------------------------------------------------- answers


def test_models(served: Served) -> None:
    (model,) = served.client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("echo", "model", "ouro_sgl")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 256
    assert served.client.models.retrieve("echo") == model
    with pytest.raises(openai.NotFoundError) as refusal:
        served.client.models.retrieve("other/model")
    assert refusal.value.code == "model_not_found"


def test_a_chat(served: Served) -> None:
    answer = served.ask(f"Paris!{END}")
    assert answer.object == "chat.completion"
    assert answer.model == "echo"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Paris!")
    assert (choice.message.tool_calls, choice.message.reasoning_content) == (None, None)
    assert (choice.finish_reason, choice.matched_stop) == ("stop", 2)
    assert choice.exit_depths == [4, 1, 2]
    assert choice.mean_exit_depth == answer.mean_exit_depth == pytest.approx(7 / 3)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert answer.metadata == {"weight_version": "default"}


def test_a_completion(served: Served) -> None:
    answer = served.complete("Paris!")
    (choice,) = answer.choices
    assert (answer.object, choice.finish_reason) == ("text_completion", "length")
    assert choice.text == "Paris!" * 8  # 16 tokens, the default
    assert answer.usage.completion_tokens == len(choice.exit_depths) == 16
    assert choice.logprobs is None


def test_the_client_s_own_models_accept_the_answers(served: Served) -> None:
    path = "/v1/chat/completions"
    asked = {"messages": [{"role": "user", "content": f"hi{CALL}{END}"}], "tools": TOOLS, "logprobs": True}
    answer = served.post(path, **asked, top_logprobs=1).json()
    ChatCompletion.model_validate(answer)
    protocol.ChatCompletion.model_validate(answer)
    for chunk in served.events(path, **asked, stream_options={"include_usage": True}):
        ChatCompletionChunk.model_validate(chunk)
        protocol.ChatChunk.model_validate(chunk)
    completed = served.post("/v1/completions", prompt="a", logprobs=2).json()
    Completion.model_validate(completed)
    protocol.Completion.model_validate(completed)
    for chunk in served.events("/v1/completions", prompt="a", logprobs=0):
        protocol.CompletionChunk.model_validate(chunk)


def test_prompts(served: Served) -> None:
    for prompt, texts in (
        ("ab", ["aba"]),
        (["ab", "cd"], ["aba", "cdc"]),
        (byte_ids("ab"), ["aba"]),
        ([byte_ids("ab"), byte_ids("c")], ["aba", "ccc"]),
    ):
        assert [choice.text for choice in served.complete(prompt, max_tokens=3).choices] == texts
    several = served.complete(["ab", "cd"], max_tokens=1, n=2, echo=True)
    assert [choice.text for choice in several.choices] == ["aba", "aba", "cdc", "cdc"]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (4, 4)
    echoed = served.complete([byte_ids("é"), byte_ids("b")], max_tokens=1, echo=True)
    assert [choice.text for choice in echoed.choices] == ["é\ufffd", "bb"]


def test_logprobs_of_completions(served: Served) -> None:
    logprobs = served.complete("ab", max_tokens=2, logprobs=1).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs) == (["a", "b"], [-0.125, -0.25])
    assert [list(best.values()) for best in logprobs.top_logprobs] == [[-0.5], [-0.5]]
    assert logprobs.text_offset == [0, 1]
    echoed = served.complete("ab", max_tokens=2, logprobs=0, echo=True).choices[0].logprobs
    assert echoed.token_logprobs == [None, -0.5, -0.125, -0.25]
    assert (echoed.tokens, echoed.text_offset) == (["a", "b", "a", "b"], [0, 1, 2, 3])
    assert echoed.top_logprobs == []


def test_logprobs_of_chats(served: Served) -> None:
    content = served.ask("é", max_tokens=2, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [(entry.bytes, entry.logprob) for entry in content] == [([0xC3], -0.125), ([0xA9], -0.25)]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2]
    assert served.ask("é", max_tokens=2).choices[0].logprobs is None


def test_token_ids_and_meta_info(served: Served) -> None:
    extra = {"return_token_ids": True, "return_meta_info": True}
    (choice,) = served.ask("ab", max_tokens=1, extra_body=extra).choices
    assert (choice.prompt_token_ids, choice.response_token_ids) == (byte_ids("ab"), byte_ids("a"))
    assert choice.meta_info["completion_tokens"] == 1
    (choice,) = served.complete("ab", max_tokens=3, extra_body=extra).choices
    assert (choice.prompt_token_ids, choice.token_ids) == (byte_ids("ab"), byte_ids("aba"))
    chunks = served.events("/v1/completions", prompt="ab", max_tokens=3, return_token_ids=True)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part["token_ids"]] == byte_ids("aba")
    assert [part.get("prompt_token_ids") for part in parts].count(byte_ids("ab")) == 1


def test_reasoning(served: Served) -> None:
    """The markers are special tokens of this tokenizer: they are seen all the same."""
    message = served.ask(THOUGHT).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "Yes.")
    message = served.ask(THOUGHT, extra_body={"separate_reasoning": False}).choices[0].message
    assert (message.reasoning_content, message.content) == (None, THOUGHT.removesuffix(END))
    deltas = [chunk.choices[0].delta for chunk in served.ask(THOUGHT, stream=True)]
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_tool_calls(served: Served) -> None:
    answer = served.ask(f"I add.\n{CALL}\n{CALL}{END}", tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    calls = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", '{"a": 1}')] * 2
    assert len({call.id for call in calls}) == 2
    without = served.ask(f"{CALL}{END}", tools=TOOLS, tool_choice="none").choices[0]
    assert (without.finish_reason, without.message.content) == ("stop", CALL)


def test_tool_calls_in_a_stream(served: Served) -> None:
    chunks = list(served.ask(f"I add.\n{CALL}\n{CALL}{END}", tools=TOOLS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I add."
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "add", '{"a": 1}'),
        (1, "add", '{"a": 1}'),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


# --------------------------------------------------------------------------- streams


@pytest.mark.parametrize("text", [f"hi Paris{END}", f"{UNICODE}{END}", END, "endless"])
def test_a_stream_of_a_chat(served: Served, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "logprobs": True}
    plain = served.post("/v1/chat/completions", **body).json()["choices"][0]
    chunks = served.events("/v1/chat/completions", **body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    last = choices[-1]
    for name in ("finish_reason", "matched_stop", "exit_depths", "mean_exit_depth"):
        assert last[name] == plain[name]
    assert "".join(choice["delta"]["content"] or "" for choice in choices) == plain["message"]["content"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert entries == plain["logprobs"]["content"]
    native = served.post("/generate", text=text, sampling_params={"max_new_tokens": 40}).json()
    assert plain["message"]["content"] == native["text"]


def test_a_stream_of_completions(served: Served) -> None:
    body = {"prompt": ["ab Paris", "é😀"], "n": 2, "max_tokens": 12, "logprobs": 1, "echo": True}
    plain = served.post("/v1/completions", **body).json()
    texts = [""] * 4
    tokens: list[list[str]] = [[] for _ in range(4)]
    offsets: list[list[int]] = [[] for _ in range(4)]
    ends: dict[int, Any] = {}
    for chunk in served.events("/v1/completions", **body):
        assert (chunk["object"], chunk["usage"]) == ("text_completion", None)
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in ends
        texts[index] += choice["text"]
        if choice["logprobs"]:
            tokens[index] += choice["logprobs"]["tokens"]
            offsets[index] += choice["logprobs"]["text_offset"]
        if choice["finish_reason"]:
            ends[index] = choice
    for index, choice in enumerate(plain["choices"]):
        assert texts[index] == choice["text"]
        assert tokens[index] == choice["logprobs"]["tokens"]
        assert offsets[index] == choice["logprobs"]["text_offset"]
        assert ends[index]["finish_reason"] == "length"
        assert ends[index]["exit_depths"] == choice["exit_depths"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("samples", [1, 2])
def test_usage_in_streams(served: Served, path: str, samples: int) -> None:
    prompt: Any = {"prompt": "ab"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "ab"}]}
    body = {**prompt, "n": samples, "max_tokens": 5}
    plain = served.post(path, **body).json()
    assert plain["usage"]["prompt_tokens"] == 2
    assert plain["usage"]["completion_tokens"] == 5 * samples
    *chunks, last = served.events(path, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert last["mean_exit_depth"] == plain["mean_exit_depth"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        chunks = served.events(path, **body, **options)
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [chunk["usage"]["completion_tokens"] for chunk in served.events(path, **body, **options)]
    assert counts == sorted(counts)
    assert counts[-1] == 5 * samples


def test_a_stop_text_never_shows(served: Served) -> None:
    for stop in ("DEF", ["x", "DEF"]):
        choices = [chunk.choices[0] for chunk in served.ask("abcDEFx", stop=stop, stream=True)]
        shown = [choice.delta.content for choice in choices if choice.delta.content]
        assert "".join(shown) == "abc"
        assert not any("D" in piece for piece in shown)
        assert (choices[-1].finish_reason, choices[-1].matched_stop) == ("stop", "DEF")
    kept = served.complete("abcDEFx", stop="DEF", extra_body={"no_stop_trim": True}).choices[0]
    assert kept.text == "abcDEF"


async def test_the_asynchronous_client(served: Served) -> None:
    url = f"{served.frontend.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": f"Paris!{END}"}], stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == "Paris!"


# --------------------------------------------------------------------------- ends


def test_an_aborted_stream_ends_in_order(served: Served) -> None:
    with served.scheduler.slowly():
        extra: Any = {"rid": "mine"}
        stream = served.ask("ab", max_tokens=200, n=2, stream=True, extra_body=extra)
        first = next(stream)
        assert first.id == "mine"
        assert served.post("/abort_request", rid="mine").status_code == 200
        chunks = list(stream)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert reasons == ["abort", "abort"]


def test_a_client_that_leaves_is_aborted(served: Served) -> None:
    aborts = len(served.scheduler.of_type(AbortReq))
    with served.scheduler.slowly():
        stream = served.ask("ab", max_tokens=200, stream=True)
        next(stream)
        stream.close()
        served.scheduler.wait_for(AbortReq, aborts + 1, 15.0)  # the call would run for longer


@pytest.mark.parametrize("stream", [False, True])
def test_failures(served: Served, stream: bool) -> None:
    """The mock refuses or breaks a request by its extra_key: before the first token, so by the status."""
    for key, status, kind in (
        ("refuse", 503, "ServiceUnavailableError"),
        ("break", 500, "InternalServerError"),
    ):
        response = served.post("/v1/completions", prompt="a", extra_key=key, stream=stream)
        assert response.status_code == status
        body = response.json()
        protocol.ErrorBody.model_validate(body)
        assert (body["type"], body["code"]) == (kind, status)


# --------------------------------------------------------------------------- what is asked for


def test_fields_reach_the_scheduler(served: Served) -> None:
    extra = {
        "top_k": 3,
        "min_p": 0.1,
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "stop_token_ids": [7],
        "exit_threshold": 0.25,
        "min_loops": 2,
        "max_loops": 3,
        "exit_mode": "ouro_delayed",
        "priority": 4,
        "extra_key": "k",
    }
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"5": 2},
        "seed": 9,
        "max_tokens": 4,
        "user": "somebody",
    }
    served.ask("a", **fields, extra_body=extra)
    served.complete("a", **fields, extra_body=extra)
    chat, completion = served.scheduler.of_type(GenerateReq)[-2:]
    assert chat.params == completion.params
    params = chat.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.75, 3, 0.1)
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.bias_ids, params.bias_values) == (1.5, [5], [2.0])
    assert (params.seed, params.max_new_tokens, params.min_new_tokens) == (9, 4, 2)
    assert params.end_ids == [0, 2, 7]
    assert (params.exit_threshold, params.min_loops, params.max_loops) == (0.25, 2, 3)
    assert params.exit_mode.name == "OURO_DELAYED"
    assert (chat.priority, chat.extra_key) == (4, "k")
    served.ask("a", max_tokens=9, max_completion_tokens=3)
    served.ask("a", extra_body={"ignore_eos": True})
    few, whole = served.scheduler.of_type(GenerateReq)[-2:]
    assert few.params.max_new_tokens == 3
    assert (whole.params.max_new_tokens, whole.params.end_ids) == (255, [])


USER = [{"role": "user", "content": "a"}]
BAD_COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [""]},
    {"prompt": [1, "a"]},
    {"prompt": [VOCAB_SIZE]},
    {"prompt": [VOCAB_SIZE], "echo": True},
    {"prompt": "a", "max_tokens": 0},
    {"prompt": "a", "max_tokens": 1000},
    {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "best_of": 2},
    {"prompt": "a", "logprobs": -1},
    {"prompt": "a", "logprobs": True},
    {"prompt": "a", "logit_bias": {"x": 1}},
    {"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "top_k": 0},
    {"prompt": "a", "n": 10**9},
    {"prompt": "a", "stop": [""]},
    {"prompt": "a", "seed": 2**63},
    {"prompt": "a", "exit_mode": "never"},
    {"prompt": "a", "exit_trace": [4]},
    {"prompt": "a", "rid": ["x", "y"]},
]
BAD_CHATS: list[dict[str, Any]] = [
    {},
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"content": "a"}]},
    {"messages": [{"role": "wizard", "content": "a"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": USER, "tools": [{"type": "function"}]},
    {"messages": USER, "tool_choice": "required"},
    {"messages": USER, "response_format": {"type": "yaml"}},
    {"messages": USER, "response_format": {"type": "json_schema"}},
    {"messages": USER, "logprobs": 1},
    {"messages": USER, "top_logprobs": 1},
    {"messages": USER, "max_completion_tokens": 0},
    {"messages": USER, "functions": [{"name": "f"}]},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/completions", body) for body in BAD_COMPLETIONS),
        *(("/v1/chat/completions", body) for body in BAD_CHATS),
    ],
    ids=str,
)
def test_bad_values_are_refused(served: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    response = served.post(path, **body, stream=stream)
    assert response.status_code == 400
    error = response.json()
    protocol.ErrorBody.model_validate(error)
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


def test_the_client_reads_a_refusal(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        served.complete("")
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.role"):
        served.client.chat.completions.create(model="m", messages=[{"role": "x", "content": ""}])  # type: ignore[list-item]


ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    [],
    [1],
    ["x"],
    [[1]],
    {},
    {"type": "x"},
    {"a": {}},
]


@pytest.mark.parametrize("chat", [False, True])
def test_no_value_breaks_the_server(served: Served, chat: bool) -> None:
    path, kind = "/v1/completions", protocol.CompletionRequest
    base: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    if chat:
        path, kind = "/v1/chat/completions", protocol.ChatRequest  # type: ignore[assignment]
        base = {"messages": USER, "max_tokens": 1}
    statuses = set()
    for name in kind.model_fields:
        for value in ODD_VALUES:
            response = served.post(path, **{**base, name: value})
            assert response.status_code in (200, 400), (name, value, response.text)
            statuses.add(response.status_code)
            if response.status_code == 400:
                protocol.ErrorBody.model_validate(response.json())
    assert statuses == {200, 400}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_other_bodies_and_methods(served: Served, path: str) -> None:
    kind = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b"null", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b'{"n":NaN}'):
        response = served.http.post(path, content=content, headers=kind)
        assert response.status_code == 400
        protocol.ErrorBody.model_validate(response.json())
    text = served.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 400
    for method in ("GET", "PUT", "DELETE"):
        assert served.http.request(method, path).status_code == 405


def test_the_documentation(served: Served) -> None:
    schema = served.http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = schema["paths"][path]["post"]
        assert {"200", "400", "503"} <= operation["responses"].keys()
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        properties = schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
        assert {"exit_threshold", "stream_options", "top_k"} <= properties.keys()
    text = json.dumps(schema)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= schema["components"]["schemas"].keys()


def test_a_long_conversation_is_read_beside_everything_else(served: Served) -> None:
    """Others are answered again and again while the server makes one prompt out of it."""
    turns = [{"role": "user", "content": "a"}] * 100_000
    body = {"messages": [*turns, {"role": "user", "content": "last" + END}]}
    with served.frontend.client() as other, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.http.post, "/v1/chat/completions", json=body)
        answered = 0
        while not answer.done():
            assert other.get("/health").status_code == 200
            answered += 1
    assert answer.result().json()["choices"][0]["message"]["content"] == "last"
    assert answered > 10
