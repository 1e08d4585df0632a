"""Reported faults of prefix caches. The looped model runs every case too: a cached prefix has all depths."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.reports.runtime import Runtime
from tests.e2e.reports.support import NATIVE, Client, greedy
from tests.worker_driver import Model

ANSWER = greedy(24, ignore_eos=True)


@pytest.fixture(params=["rand", "ouro"])
def client(request: pytest.FixtureRequest) -> Client:
    """Every token at full depth, or tokens that leave after 1, 2, 3 and 4 loops."""
    found: Client = request.getfixturevalue(request.param)
    return found


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def essence(answer: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    meta = answer["meta_info"]
    values = [value for value, *_ in meta.get("output_token_logprobs", [])]
    return answer["output_ids"], meta["exit_depths"], values


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["meta_info"]["cached_tokens"]
    return count


def ask(client: Client, ids: list[int], sampling: Any = ANSWER) -> dict[str, Any]:
    answer: dict[str, Any] = client.generate(ids, sampling, return_logprob=True)
    return answer


def test_pfx_01_warm_answers_equal_cold_ones(client: Client) -> None:
    ids = prompt(40, 1)
    relative = ids[:25] + prompt(15, 2)
    assert client.is_idle()
    cold = ask(client, ids)
    warm = ask(client, ids)
    shared = ask(client, relative)
    assert [cached(answer) for answer in (cold, warm, shared)] == [0, 39, 25]
    assert client.flush()
    again = ask(client, ids)
    assert client.flush()
    alone = ask(client, relative)
    assert cached(again) == cached(alone) == 0
    assert essence(cold) == essence(warm) == essence(again)
    assert essence(shared) == essence(alone)


def test_pfx_01_a_server_without_a_cache_gives_the_same(
    client: Client, rand_model: Path, request: pytest.FixtureRequest
) -> None:
    threshold = {"rand": 1.0, "ouro": 0.7}[request.node.callspec.params["client"]]
    torch.set_num_threads(1)
    plain = Runtime(Model(rand_model), radix_cache=False)
    for ids in (prompt(40, 1), prompt(40, 1)[:25] + prompt(15, 2)):
        for _ in range(2):
            warm = ask(client, ids)
        heard = plain.answer(ids, max_new_tokens=24, exit_threshold=threshold)
        assert (heard.ids, heard.depths) == essence(warm)[:2]
        assert heard.logprobs == pytest.approx(essence(warm)[2], abs=1e-4)
        assert cached(warm) == 39
        assert heard.cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_pfx_02_a_prompt_that_is_cached_as_a_whole(small: Client, length: int) -> None:
    """Pages hold one token and chunks 16, so these lengths lie on and beside every edge."""
    ids = prompt(length, 3)
    assert small.is_idle()
    cold = ask(small, ids, greedy(6))
    assert cached(cold) == 0
    later = [ask(small, ids, greedy(6)) for _ in range(3)]
    later += small.at_once([lambda: ask(small, ids, greedy(6))] * 3)
    for answer in later:
        assert cached(answer) == length - 1
        assert essence(answer) == essence(cold)
    assert small.flush()
    for answer in small.at_once([lambda: ask(small, ids, greedy(6))] * 3):
        assert cached(answer) <= length - 1
        assert essence(answer) == essence(cold)


def test_pfx_05_eviction_spares_a_prefix_that_is_in_use(small: Client) -> None:
    prefix = prompt(100, 4)
    body = {"input_ids": prefix + prompt(10, 5), "sampling_params": greedy(150, ignore_eos=True)}
    assert small.is_idle()
    expected = small.generate(body["input_ids"], body["sampling_params"])
    assert small.flush()
    small.generate(prefix, greedy(1))
    stream = small.stream(NATIVE, body).wait_chunks()
    before = small.get("/server_info").json()["internal_states"][0]
    # Some strangers share a part of the prefix, which splits the node that the stream holds.
    floods = [prefix[: 20 * (index % 3)] + prompt(60 - 20 * (index % 3), 100 + index) for index in range(30)]
    for start in range(0, 30, 3):
        part = [lambda ids=ids: small.generate(ids, greedy(1)) for ids in floods[start : start + 3]]
        small.at_once(part)
    chunks = stream.finish()
    assert chunks[0]["meta_info"]["cached_tokens"] == 100
    assert chunks[-1]["output_ids"] == expected["output_ids"]
    # The floods did not fit beside each other: some were evicted.
    after = small.get("/server_info").json()["internal_states"][0]
    assert after["prompt_tokens"] - before["prompt_tokens"] > 1000
    # Without a flush: all that is cached can be evicted.
    answer = small.generate(prompt(299, 6), greedy(1))
    assert answer["meta_info"]["prompt_tokens"] == 299


def test_pfx_06_flush_while_busy_and_right_after(client: Client) -> None:
    sampling = greedy(400, ignore_eos=True)
    body = {"input_ids": prompt(30, 7), "sampling_params": sampling}
    expected = client.solo(body["input_ids"], sampling)
    stream = client.stream(NATIVE, body).wait_chunks(2)
    for _ in range(5):
        assert client.post("/flush_cache", {}).status_code == 400
        assert client.get("/flush_cache").status_code == 400
    assert stream.running
    assert stream.finish()[-1]["output_ids"] == expected["output_ids"]
    assert client.flush()
    for _ in range(20):
        answer = client.generate(body["input_ids"], greedy(2))
        assert cached(answer) == 0
        assert client.flush()
    for _ in range(5):
        client.stream(NATIVE, {**body, "sampling_params": greedy(3)}).finish()
        assert client.get("/flush_cache").status_code == 200
    assert client.at_once([client.flush] * 2) == [True, True]


def test_pfx_09_long_prompts_are_found_whole_and_counted_right(small: Client) -> None:
    ids = prompt(100, 8)
    assert small.is_idle()
    # Chunks 2 to 7 start from positions that are computed, which is no hit.
    first = small.stream(NATIVE, {"input_ids": ids, "sampling_params": greedy(4)}).finish()
    assert {cached(chunk) for chunk in first} == {0}
    assert cached(small.generate(ids, greedy(4))) == 99


def test_our_09_a_prefix_is_shared_between_depth_rules_and_stays_exact(ouro: Client) -> None:
    """Prompts run all loops under every rule, so one cached prefix serves all rules, bit for bit."""
    rules: list[dict[str, Any]] = [
        {"exit_threshold": 0.5},
        {"exit_threshold": 1.0},
        {"max_loops": 2},
        {"min_loops": 3},
        {"exit_mode": "ouro_delayed"},
        {"max_loops": 1},
    ]
    ids = prompt(40, 9)
    cold = []
    for rule in rules:
        assert ouro.is_idle()
        cold.append(ask(ouro, ids, {**ANSWER, **rule}))
    assert len({str(answer["output_ids"]) for answer in cold}) > 1, "the rules change nothing here"
    for rule, answer in zip(rules, cold, strict=True):
        warm = ask(ouro, ids, {**ANSWER, **rule})
        assert cached(warm) == 39
        assert essence(warm) == essence(answer)
    # A conversation goes on: what other rules generated is part of the prompt now.
    longer = ids + cold[0]["output_ids"]
    warm = ask(ouro, longer, {**ANSWER, **rules[1]})
    assert ouro.flush()
    assert essence(ask(ouro, longer, {**ANSWER, **rules[1]})) == essence(warm)


def test_our_09_capacity_comes_back(small: Client) -> None:
    assert small.generate(prompt(299, 10), greedy(1))["meta_info"]["prompt_tokens"] == 299
    assert small.is_idle()
    state = small.get("/server_info").json()["internal_states"][0]
    assert state["free_slots"] + state["cached_slots"] == state["num_slots"]
