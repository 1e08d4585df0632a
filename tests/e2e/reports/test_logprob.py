"""Log-probabilities: of every prompt token that was asked for, whatever was cached or cut in chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ouro_sgl.messages import RowParams
from ouro_sgl.models.config import load_config
from ouro_sgl.models.reference import ReferenceModel
from ouro_sgl.models.weights import load_weights
from tests.e2e.reports.runtime import Runtime
from tests.e2e.reports.support import CHAT, COMPLETIONS, NATIVE, SCRIPT_VOCAB, Client, greedy, message
from tests.worker_driver import Model

CLOSE = 1e-4
Score = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def score(rand_model: Path) -> Score:
    """Log-probabilities [P, V] of the plain reference; row j is of position j + 1."""
    config = load_config(rand_model)
    reference = ReferenceModel(config, load_weights(rand_model, config, torch.float32, torch.device("cpu")))

    def run(ids: list[int]) -> torch.Tensor:
        params = RowParams(max_new_tokens=0, temperature=0.0, max_loops=config.total_loops)
        return torch.log_softmax(reference.generate(ids, params).prompt_logits, -1)

    return run


def random_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(count)]


def check_prompt(meta: Any, ids: list[int], start: int, expected: torch.Tensor, tops: int) -> None:
    """All that is said about the prompt, against the reference."""
    triples = meta["input_token_logprobs"]
    assert [entry[1] for entry in triples] == ids[start:]
    assert len(meta["input_top_logprobs"]) == len(triples)
    for position, entry, top in zip(range(start, len(ids)), triples, meta["input_top_logprobs"], strict=True):
        if position == 0:
            assert entry[0] is None
            assert top is None
            continue
        row = expected[position - 1]
        assert entry[0] == pytest.approx(float(row[ids[position]]), abs=CLOSE)
        values = row.topk(tops).values.tolist()
        assert [value for value, _, _ in top] == pytest.approx(values, abs=CLOSE)
        assert all(float(row[token]) == pytest.approx(value, abs=CLOSE) for value, token, _ in top)


def test_log_01_a_prompt_that_is_cached(rand: Client, score: Score) -> None:
    ids = random_ids(33, 1)
    longer = ids[:20] + random_ids(25, 2)
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    assert rand.is_idle()
    for prompt in (ids, ids, longer, longer[:40], ids):
        meta = rand.generate(prompt, greedy(1), **fields)["meta_info"]
        check_prompt(meta, prompt, 0, score(prompt), 2)
        assert meta["output_token_logprobs"][0][0] == pytest.approx(float(score(prompt)[-1].max()), abs=CLOSE)
    # Without prompt log-probabilities the same prompt does come from the cache.
    assert rand.generate(ids, greedy(1))["meta_info"]["cached_tokens"] == 32
    for start in (10, 32):
        meta = rand.generate(ids, greedy(1), **{**fields, "logprob_start_len": start})["meta_info"]
        assert 0 < meta["cached_tokens"] < start
        check_prompt(meta, ids, start, score(ids), 2)


@pytest.mark.parametrize("server", ["rand", "narrow"])
def test_log_03_a_prompt_in_chunks(request: pytest.FixtureRequest, score: Score, server: str) -> None:
    """Whole, and in chunks of 16; streamed and not; beside others that generate."""
    client: Client = request.getfixturevalue(server)
    ids = random_ids(50, 3)
    expected = score(ids)
    neighbours = [client.stream(NATIVE, {"text": "neighbour", "sampling_params": greedy(50)}) for _ in "ab"]
    for start in (0, 15, 16, 17, 49):
        fields = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 3}
        plain = client.generate(ids, greedy(2), **fields)
        check_prompt(plain["meta_info"], ids, start, expected, 3)
        body = {"input_ids": ids, "sampling_params": greedy(2), **fields}
        streamed = client.stream(NATIVE, body).finish()[-1]
        for key in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs"):
            assert streamed["meta_info"][key] == plain["meta_info"][key]
    texts = {neighbour.finish()[-1]["text"] for neighbour in neighbours}
    assert texts == {client.generate("neighbour", greedy(50))["text"]}


def test_log_03_no_chunk_size_changes_a_bit(rand_model: Path) -> None:
    torch.set_num_threads(1)
    model = Model(rand_model)
    ids = random_ids(50, 3)

    def told(chunk: int, start: int) -> list[Any]:
        runtime = Runtime(model, chunked_prefill_size=chunk)
        neighbours = [runtime.submit(random_ids(9, 4), max_new_tokens=40) for _ in range(2)]
        for _ in range(20):
            runtime.turn()
        uid = runtime.submit(ids, max_new_tokens=2, prompt_logprob_start=start, top_logprobs_num=3)
        runtime.run()
        assert all(len(runtime.heard[neighbour].ids) == 40 for neighbour in neighbours)
        prompt = runtime.heard[uid].prompt_logprobs
        assert prompt is not None
        assert (prompt.start, len(prompt.values), len(prompt.tops)) == (start, 50 - start, 50 - start)
        tops = [top and (top.top_ids, top.top_values) for top in prompt.tops]
        return [prompt.values, tops, runtime.heard[uid].bits()]

    for start in (0, 15, 16, 17):
        whole = told(512, start)
        for chunk in (1, 7, 16, 50):
            assert told(chunk, start) == whole, (chunk, start)


def test_log_04_more_top_logprobs_than_tokens(script: Client) -> None:
    with script.unharmed(sampling=greedy(100)):
        fields = {"return_logprob": True, "logprob_start_len": 0}
        meta = script.generate("ab", greedy(1), top_logprobs_num=SCRIPT_VOCAB, **fields)["meta_info"]
        for tops in (meta["output_top_logprobs"][0], meta["input_top_logprobs"][1]):
            assert sorted(token for _, token, _ in tops) == list(range(SCRIPT_VOCAB))
        for bad in (SCRIPT_VOCAB + 1, 10**6, -1, True, 1.5, "2"):
            body = {"text": "ab", "sampling_params": greedy(1), "top_logprobs_num": bad, **fields}
            assert script.post(NATIVE, body).status_code == 400, bad
            chat = {"messages": message(), "max_tokens": 1, "logprobs": True, "top_logprobs": bad}
            assert script.post(CHAT, chat).status_code == 400, bad
            completion = {"prompt": "ab", "max_tokens": 1, "logprobs": bad}
            assert script.post(COMPLETIONS, completion).status_code == 400, bad


def test_log_07_ids_outside_the_vocabulary(rand: Client, score: Score) -> None:
    vocab = 259
    for asked in (True, False):
        for bad in ([vocab], [-1], [10**9], [2**70], [1.5], [[[1]]], [["1"]], [[1], [vocab]], "1", [True]):
            body = {
                "input_ids": [50, 60],
                "sampling_params": greedy(1),
                "return_logprob": asked,
                "token_ids_logprob": bad,
            }
            assert rand.post(NATIVE, body).status_code == 400, bad
    fields = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [0, vocab - 1, 7]}
    meta = rand.generate([50, 60], greedy(1), **fields)["meta_info"]
    expected = score([50, 60])
    for entries, row in (
        (meta["input_token_ids_logprobs"][1], expected[0]),
        (meta["output_token_ids_logprobs"][0], expected[1]),
    ):
        assert [token for _, token, _ in entries] == [0, vocab - 1, 7]
        wanted = [float(row[token]) for token in (0, vocab - 1, 7)]
        assert [value for value, _, _ in entries] == pytest.approx(wanted, abs=CLOSE)


def test_log_08_no_alternatives(script: Client) -> None:
    def completion(**fields: Any) -> Any:
        body = {"prompt": "s", "max_tokens": 4, "temperature": 0, **fields}
        return script.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]

    chosen = completion(logprobs=0)
    assert len(chosen["token_logprobs"]) == len(chosen["tokens"]) == 4
    assert not chosen["top_logprobs"] or not any(chosen["top_logprobs"])
    one = completion(logprobs=1)
    assert one["token_logprobs"] == chosen["token_logprobs"]
    assert [list(top) for top in one["top_logprobs"]] == [["a"], ["b"], ["c"], ["D"]]
    assert completion(logprobs=None) is None
    assert completion() is None

    def chat(**fields: Any) -> Any:
        body = {"messages": message(), "max_tokens": 4, "temperature": 0, **fields}
        return script.post(CHAT, body).json()["choices"][0]["logprobs"]

    content = chat(logprobs=True)["content"]
    assert [entry["token"] for entry in content[:2]] == ["H", "i"]
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert chat(logprobs=None) is None
    assert chat(logprobs=False) is None
