"""Through the real server: a request's bits do not depend on how, or beside what, it is asked."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.models import rand_checkpoint
from tests.server import Server, running_server

SAMPLING = {"max_new_tokens": 20, "ignore_eos": True, "exit_threshold": 0.6, "sampling_seed": 77}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = rand_checkpoint(tmp_path_factory.mktemp("rand"))
    flags = ["--chunked-prefill-size", "40", "--rounds-in-flight", "3"]
    with running_server(folder, "--num-slots", "8192", *flags) as running:
        yield running


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def ask(server: Server, input_ids: list[int], **changes: Any) -> list[dict[str, Any]]:
    """The sequences of one call, with log-probabilities."""
    stream = changes.pop("stream", False)
    start = changes.pop("logprob_start_len", -1)
    body = {
        "input_ids": input_ids,
        "sampling_params": {**SAMPLING, **changes},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
        "stream": stream,
    }
    answer = server.post("/generate", body)
    assert answer.status == 200, answer.body
    if not stream:
        whole = answer.json()
        return whole if isinstance(whole, list) else [whole]
    *lines, end = [line for line in answer.body.split(b"\n\n") if line]
    assert end == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    finals = {c.get("index", 0): c for c in chunks if c["meta_info"]["finish_reason"] is not None}
    return [finals[index] for index in sorted(finals)]


def bits(answer: dict[str, Any]) -> dict[str, Any]:
    """What must be the same; JSON keeps every bit of a float."""
    meta = answer["meta_info"]
    names = ("exit_depths", "output_token_logprobs", "output_top_logprobs", "input_token_logprobs")
    return {"text": answer["text"], "output_ids": answer["output_ids"], **{n: meta[n] for n in names}}


def flush(server: Server) -> None:
    assert server.get("/flush_cache").status == 200


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone_and_in_company(server: Server, temperature: float) -> None:
    mine = prompt(1, 100)
    flush(server)
    alone = bits(ask(server, mine, temperature=temperature)[0])
    assert len(set(alone["exit_depths"][1:])) > 1
    flush(server)
    assert bits(ask(server, mine, temperature=temperature, stream=True)[0]) == alone
    hit = ask(server, mine, temperature=temperature)[0]
    assert hit["meta_info"]["cached_tokens"] == len(mine) - 1
    assert bits(hit) == alone
    flush(server)
    others = [(mine[: 10 * i] + prompt(i, 30 + 7 * i), 0.3 + 0.04 * i) for i in range(15)]
    with ThreadPoolExecutor(16) as pool:
        company = []
        for number, (other, threshold) in enumerate(others):
            options = {"exit_threshold": threshold, "sampling_seed": number, "stream": bool(number % 2)}
            company.append(pool.submit(ask, server, other, temperature=1.0, max_new_tokens=40, **options))
        beside = [pool.submit(ask, server, mine, temperature=temperature) for _ in range(2)]
        streamed = pool.submit(ask, server, mine, temperature=temperature, stream=True)
        for call in (*beside, streamed):
            assert bits(call.result(200)[0]) == alone
        assert all(len(call.result(200)[0]["output_ids"]) == 40 for call in company)


def test_samples_of_one_call(server: Server) -> None:
    """n = 3: each sample has the bits that its own seed gives, however it is asked for."""
    mine = prompt(2, 70)
    flush(server)
    plain = [bits(a) for a in ask(server, mine, n=3, temperature=1.0)]
    assert len({str(sample["output_ids"]) for sample in plain}) == 3
    assert bits(ask(server, mine, temperature=1.0)[0]) == plain[0]
    assert [bits(a) for a in ask(server, mine, n=3, temperature=1.0, stream=True)] == plain
    flush(server)
    with ThreadPoolExecutor(16) as pool:
        for seed in range(12):
            pool.submit(ask, server, prompt(seed, 60), temperature=1.0, sampling_seed=seed)
        beside = pool.submit(ask, server, mine, n=3, temperature=1.0)
        assert [bits(a) for a in beside.result(200)] == plain


@pytest.mark.parametrize("start", [-1, 0, 1, 2, 39, 40, 41, 68, 69, 70])
def test_prompt_logprobs_with_and_without_a_hit(server: Server, start: int) -> None:
    """The cache may give at most the tokens before ``start - 1``; the values are those of a cold run."""
    mine, count = prompt(3, 70), 4
    flush(server)
    whole = ask(server, mine, logprob_start_len=0, max_new_tokens=count)[0]["meta_info"]
    flush(server)
    cold = ask(server, mine, logprob_start_len=start, max_new_tokens=count)[0]
    hit = ask(server, mine, logprob_start_len=start, max_new_tokens=count)[0]
    assert bits(hit) == bits(cold)
    limit = 69 if start == -1 else max(min(69, start - 1), 0)
    assert hit["meta_info"]["cached_tokens"] == limit
    wanted = [] if start == -1 else whole["input_token_logprobs"][start:]
    assert cold["meta_info"]["input_token_logprobs"] == wanted
    assert len(wanted) == (0 if start == -1 else 70 - start)
