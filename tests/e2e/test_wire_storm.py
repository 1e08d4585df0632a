"""Two thousand calls that are wrong in every way, beside good streams that must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import rand_checkpoint
from tests.server import Server, running_server

CALLS = 2000
AT_ONCE = 12
STREAMS = 32
PATIENCE = 200.0  # seconds for any one answer on a busy machine
MAX_BODY = 1 << 16
SLOTS = 16384
BOMBS = 2  # grammars that cost the server a second each

JSON = b"Content-Type: application/json"
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
POSTS = (GENERATE, COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/abort_request", "/pause_generation")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = rand_checkpoint(tmp_path_factory.mktemp("rand"), threshold=0.7)
    flags = ("--num-slots", str(SLOTS), "--max-running-requests", str(STREAMS + 4))
    with running_server(folder, *flags, "--max-body-bytes", str(MAX_BODY)) as running:
        yield running


# --------------------------------------------------------------------------- bad calls


class Call:
    """Bytes for the server. ``hang_up``: nobody waits for the answer, and the connection breaks."""

    def __init__(self, data: bytes, hang_up: bool = False) -> None:
        self.data = data
        self.hang_up = hang_up


def request(path: str, body: bytes, *headers: bytes, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", b"Connection: close", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def post(path: str, payload: Any) -> Call:
    return Call(request(path, json.dumps(payload).encode(), JSON))


def prompt_for(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    if path == COMPLETIONS:
        return {"prompt": "hi", "max_tokens": 4}
    return {"text": "hi"}


def no_http(rng: random.Random) -> Call:
    lines = [
        *(b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET\r\n\r\n", b"HELLO / HTTP/1.1\r\n\r\n", b"\0" * 64),
        *(b"GET / HTTP/9.9\r\n\r\n", b"POST /generate HTTP/1.1\r\nno colon\r\n\r\n"),
        b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        rng.randbytes(200) + b"\r\n\r\n",
    ]
    return Call(rng.choice(lines))


def bad_length(rng: random.Random) -> Call:
    value = rng.choice([b"-1", b"abc", b"1e3", b"9" * 30, b"5\r\nContent-Length: 6", b"0x10"])
    head = [b"POST /generate HTTP/1.1", b"Host: x", b"Connection: close", JSON, b"Content-Length: " + value]
    return Call(b"\r\n".join([*head, b"", b"{}"]))


def bad_chunks(rng: random.Random) -> Call:
    body = rng.choice(
        [b"zz\r\n{}\r\n0\r\n\r\n", b"-5\r\n{}\r\n", b"2\r\n{}oops\r\n", b"2\r\n{]\r\n0\r\n\r\n"]
    )
    kind = rng.choice([b"chunked", b"gzip", b"chunked, nonsense"])
    head = [b"POST /generate HTTP/1.1", b"Host: x", b"Connection: close", JSON]
    # Nothing says where a body ends that is coded in another way, so the caller has to.
    return Call(b"\r\n".join([*head, b"Transfer-Encoding: " + kind, b"", body]), hang_up=kind != b"chunked")


def bad_headers(rng: random.Random) -> Call:
    header = rng.choice([b"Content-Type: text/plain", b"Content-Type: ;;;", b"Content-Type: \xff\xfe/x"])
    return Call(request(rng.choice([GENERATE, COMPLETIONS, CHAT]), b'{"text":"hi"}', header))


def too_long(rng: random.Random) -> Call:
    path = rng.choice(POSTS)
    if rng.random() < 0.5:  # announced, and never sent
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
        return Call(head + b"Content-Length: %d\r\n\r\n" % rng.choice([MAX_BODY + 1, 1 << 40]))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    return Call(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 5 + b"0\r\n\r\n")


def half_sent(rng: random.Random) -> Call:
    whole = request(rng.choice(POSTS), json.dumps({"text": "hello " * 50}).encode(), JSON)
    return Call(whole[: rng.randrange(1, len(whole))], hang_up=True)


def hung_up(rng: random.Random) -> Call:
    """A good request, but nobody waits for its answer."""
    path = rng.choice([GENERATE, COMPLETIONS, CHAT])
    body = {**prompt_for(path), "stream": rng.random() < 0.5}
    return Call(request(path, json.dumps(body).encode(), JSON), hang_up=True)


def unknown_route(rng: random.Random) -> Call:
    path = rng.choice(["/nothing", "/generate/", "/v1", "/%00", "/../../etc/passwd", "/v1/embeddings", "//"])
    path += rng.choice(["", "?a=%ff", "?" + "x" * 3000])
    return Call(request(path, b"{}", JSON, method=rng.choice(["GET", "POST", "DELETE", "PUT"])))


def wrong_method(rng: random.Random) -> Call:
    return Call(request(rng.choice(POSTS), b"", method=rng.choice(["GET", "DELETE", "PATCH", "OPTIONS"])))


def no_json(rng: random.Random) -> Call:
    bodies = [
        *(b"{", b'{"text":', b"}", b"text=hi", b"[1, 2", b'{"text":"hi"}x', b'{"text":"a\nb"}', b"\xff\xfe"),
        *(b'{"text":"\xff"}', b'{"text":"\xc3"}', b'{"text":"\\ud800"}', b'{"a":NaN}', b'{"a":Infinity}'),
        *(b"[" * 20000, b'{"a":' * 10000, b'{"text":"hi"}\0', b'\xef\xbb\xbf{"text":"hi"}', b'{"a":1e400}]'),
    ]
    return Call(request(rng.choice(POSTS), rng.choice(bodies), JSON))


def other_json(rng: random.Random) -> Call:
    paths = [path for path in POSTS if path != "/pause_generation"]
    return post(rng.choice(paths), rng.choice([[], 1, "text", True, [{}], 1.5, [None]]))


def wrong_type(rng: random.Random) -> Call:
    path = rng.choice([GENERATE, COMPLETIONS, CHAT])
    if path == GENERATE:
        names = ["text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "extra_key"]
        names += ["logprob_start_len", "top_logprobs_num", "token_ids_logprob", "priority"]
    else:
        names = ["n", "stop", "stream", "temperature", "top_p", "seed", "logit_bias", "max_tokens"]
        names += ["messages", "tools", "response_format"] if path == CHAT else ["prompt", "echo"]
    wrong = rng.choice([{"a": [{}]}, [[["x"]]], [[1.5]], {"": None}])
    return post(path, {**prompt_for(path), rng.choice(names): wrong})


def bad_sampling(rng: random.Random) -> Call:
    wrong: dict[str, list[Any]] = {
        "temperature": [-1, 1e999, "hot", [], True],
        "top_p": [0, 1.5, "x"],
        "top_k": [0, -2, 1.5, "x"],
        "max_new_tokens": [-1, 1 << 40, "many", 1.5],
        "min_new_tokens": [-1, 1 << 70],
        "stop": [5, ["a"] * 33, [1], {}],
        "stop_token_ids": [[-1], ["a"], [1 << 70]],
        "n": [0, -1, 1 << 30, 1.5],
        "logit_bias": [{"x": 1}, {"999999": 1}, {"5": "a"}, []],
        "sampling_seed": [1 << 64, "x", 1.5],
        "exit_threshold": [-0.1, 2, "x"],
        "min_loops": [0, 9],
        "max_loops": [0, 9],
        "exit_trace": [[0], [4], ["x"], [4] * 200 + [5]],
        "nonsense": [1],
    }
    name = rng.choice(list(wrong))
    value = rng.choice(wrong[name])
    body = {"text": "hi", "sampling_params": {name: value}, "stream": rng.random() < 0.3}
    return post(GENERATE, body)


def bad_input(rng: random.Random) -> Call:
    bodies: list[dict[str, Any]] = [
        *({}, {"input_ids": []}, {"text": []}, {"input_ids": [-1]}, {"input_ids": [259]}, {"text": ["a", 5]}),
        *({"input_ids": [1 << 70]}, {"input_ids": [[3], 3]}, {"input_ids": [5] * 1024}, {"text": "x" * 2000}),
        *({"text": ["a", "b"], "rid": ["x", "x"]}, {"text": "a", "rid": "r" * 2000}),
        *({"text": ["a"] * 5000}, {"text": "a", "return_logprob": True, "top_logprobs_num": 1000}),
    ]
    return post(GENERATE, {**rng.choice(bodies), "stream": rng.random() < 0.3})


def bad_grammar(rng: random.Random) -> Call:
    wrong: list[dict[str, Any]] = [
        *({"regex": pattern} for pattern in ("[", "(", "a{2,1}", "\\", "(?=a)", r"(a)\1")),
        *({"json_schema": text} for text in ("{", "5", '{"type":"nope"}', '{"$ref":"#/nowhere"}')),
        *({"ebnf": text} for text in ("root ::= nowhere", "::=", "x", 'root ::= "a')),
        *({"stop_regex": text} for text in ("(", "[", "a{99999}", ["("], "\\")),
        {"regex": "a", "json_schema": "{}"},
    ]
    return post(GENERATE, {"text": "hi", "sampling_params": rng.choice(wrong)})


def bomb(rng: random.Random) -> Call:
    schema = {"type": "integer", "allOf": [{"multipleOf": n} for n in (rng.randrange(90, 120), 89, 83)]}
    return post(GENERATE, {"text": "hi", "sampling_params": {"json_schema": schema}})


def bad_openai(rng: random.Random) -> Call:
    wrong: list[tuple[str, dict[str, Any]]] = [
        *(
            (CHAT, {"messages": m})
            for m in ([], [{}], [{"role": "robot", "content": "x"}], [{"role": "user"}])
        ),
        (CHAT, {**prompt_for(CHAT), "response_format": {"type": "json_schema"}}),
        (CHAT, {**prompt_for(CHAT), "tools": [{"type": "function"}]}),
        (CHAT, {**prompt_for(CHAT), "tool_choice": "required"}),
        (CHAT, {**prompt_for(CHAT), "max_tokens": 0}),
        *((COMPLETIONS, {"prompt": prompt}) for prompt in ([], [[]], [-1], [["a"]], None)),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        (COMPLETIONS, {"prompt": "a", "best_of": 5}),
        (COMPLETIONS, {"prompt": "a", "regex": "["}),
    ]
    path, body = rng.choice(wrong)
    return post(path, {**body, "stream": rng.random() < 0.3})


def bad_action(rng: random.Random) -> Call:
    wrong: list[tuple[str, Any]] = [
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [1 << 70]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [[3], "x"]}),
        ("/abort_request", {"rid": 5}),
        ("/abort_request", {"abort_all": "yes"}),
        ("/pause_generation", {"mode": "sleep"}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("/flush_cache", {}),  # refused while streams run, which is nearly always
    ]
    return post(*rng.choice(wrong))


KINDS: tuple[Callable[[random.Random], Call], ...] = (
    *(no_http, bad_length, bad_chunks, bad_headers, too_long, half_sent, hung_up, unknown_route),
    *(wrong_method, no_json, other_json, wrong_type, bad_sampling, bad_input, bad_grammar, bad_openai),
    bad_action,
)


async def send(server: Server, call: Call, pause: float) -> bytes:
    """The whole answer, b"" without one; a caller who hangs up does so after ``pause`` seconds."""
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(call.data)
        if call.hang_up:
            await asyncio.sleep(pause)
            return b""
        answer = b""
        # A server may break the connection as soon as it has seen enough.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            while data := await reader.read(1 << 16):
                answer += data
        return answer
    finally:
        if call.hang_up:  # a reset, not an orderly end
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


def check_refusal(call: Call, answer: bytes) -> str:
    """What became of a bad call: the status of its refusal, or ``WRONG`` and the call."""
    if call.hang_up or not answer:
        return "no answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    may_succeed = call.data.startswith(b"POST /flush_cache ")
    if 400 <= status < 500 or (status == 200 and (b'{"error":' in body or may_succeed)):
        return str(status)
    return f"WRONG: {call.data[-300:]!r} got {answer[:300]!r}"


# --------------------------------------------------------------------------- good streams


def good(number: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 50, "ignore_eos": True, "sampling_seed": number}
    if number % 3:
        sampling["temperature"] = 0.0
    return {"text": f"stream {number}", "sampling_params": sampling, "return_logprob": True, "stream": True}


async def stream(client: httpx.AsyncClient, number: int) -> list[Any]:
    """What must not change of a stream's answer."""
    response = await client.post(GENERATE, json=good(number))
    assert response.status_code == 200
    *events, done = [event for event in response.text.split("\n\n") if event]
    assert done == "data: [DONE]"
    answer = json.loads(events[-1].removeprefix("data: "))
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "length", meta
    return [answer["text"], answer["output_ids"], meta["exit_depths"], meta["output_token_logprobs"]]


def processes(server: Server) -> dict[str, int]:
    """Process ids by title, without the one that tries out grammars, which may die of one."""
    main = server.process.pid
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    titles: dict[str, int] = {}
    for pid in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just died
            titles[Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]] = int(pid)
    return {name: titles[name] for name in ("ouro_sgl::scheduler", "ouro_sgl::worker")} | {"main": main}


async def test_bad_calls_beside_good_streams(server: Server) -> None:
    rng = random.Random(11)
    calls = [kind(rng) for _ in range(CALLS // len(KINDS) + 1) for kind in KINDS][: CALLS - BOMBS]
    calls += [bomb(rng) for _ in range(BOMBS)]
    rng.shuffle(calls)
    before = processes(server)
    queue = iter(calls)
    outcomes: list[str] = []
    over = asyncio.Event()
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE, trust_env=False, limits=limits
    ) as client:
        expected = await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))
        assert len({depth for answer in expected for depth in answer[2]}) == 4

        async def attack() -> None:
            for call in queue:
                answer = await asyncio.wait_for(send(server, call, rng.uniform(0, 0.03)), PATIENCE)
                outcomes.append(check_refusal(call, answer))

        async def go_on(number: int) -> int:
            """Repeat a good stream for as long as bad calls come."""
            count = 0
            while not over.is_set() or not count:
                assert await stream(client, number) == expected[number]
                count += 1
            return count

        async def storm() -> None:
            try:
                await asyncio.gather(*(attack() for _ in range(AT_ONCE)))
            finally:
                over.set()

        counts, _ = await asyncio.gather(asyncio.gather(*(go_on(n) for n in range(STREAMS))), storm())
    assert [outcome for outcome in outcomes if "WRONG" in outcome] == []
    assert len(outcomes) == CALLS
    # Most are told what was wrong, and only connections of their own making get no answer.
    assert {"400", "404", "405", "413", "200"} <= set(outcomes)
    assert outcomes.count("no answer") < CALLS // 4
    assert min(counts) >= 1
    assert processes(server) == before
    assert server.process.poll() is None
    assert "Traceback" not in server.log()
    for _ in range(200):
        if server.get("/flush_cache").status == 200:
            break
        await asyncio.sleep(0.05)
    info = server.get("/server_info").json()["internal_states"][0]
    assert info["free_slots"] == SLOTS
