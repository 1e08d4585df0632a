"""``sampling_params``: limits, defaults, and the words of a refusal."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.grammar import MAX_SOURCE_BYTES, Grammar
from ouro_sgl.frontend.sampling import (
    CHECKS,
    UINT64,
    Limits,
    SamplingParams,
    mix_seed,
    parse_sampling_params,
)
from ouro_sgl.messages import ExitMode, RowParams

LIMITS = Limits(
    total_loops=4,
    vocab_size=100,
    context_length=64,
    served_length=64,
    has_lookahead=False,
    end_ids=(0, 2),
    exit_mode=ExitMode.OURO,
    exit_threshold=0.9,
    min_loops=1,
    max_loops=4,
    traces={"known": [4, 1, 2]},
)


def parse(limits: Limits = LIMITS, **raw: Any) -> SamplingParams:
    return parse_sampling_params(raw, limits)


def row(prompt_tokens: int = 10, limits: Limits = LIMITS, **raw: Any) -> RowParams:
    return parse(limits, **raw).row_params(prompt_tokens, seed=0)


def test_defaults() -> None:
    assert parse().row_params(10, seed=7) == RowParams(
        max_new_tokens=54, end_ids=[0, 2], seed=7, exit_threshold=0.9, min_loops=1, max_loops=4
    )
    settings = parse()
    assert (settings.n, settings.stops, settings.skip_special_tokens) == (1, [], True)
    assert (settings.no_stop_trim, settings.stream_interval) == (False, 1)


def test_null_means_the_default() -> None:
    everything = dict.fromkeys(CHECKS)
    del everything["max_new_tokens"]  # null has a meaning of its own there
    assert parse(**everything).row_params(10, seed=7) == parse().row_params(10, seed=7)


BAD = {
    "temperature": [-0.1, math.nan, math.inf, -math.inf, "1", True, [1.0], 10**400],
    "top_p": [0, -1, 1.0001, math.nan, "x"],
    "top_k": [0, -2, 1.5, "5", True],
    "min_p": [-0.1, 1.1, math.nan],
    "frequency_penalty": [-2.01, 2.01, math.inf],
    "presence_penalty": [-2.01, 2.01, {}],
    "repetition_penalty": [0, 2.01, -1, math.nan],
    "regex": [5, ["a"], {}, "a" * (MAX_SOURCE_BYTES + 1), "\ud800"],
    "ebnf": [5, ["a"], "é" * (MAX_SOURCE_BYTES // 2 + 1)],
    "json_schema": [5, True, ["a"]],
    "stop_regex": [5, [5], ["a", ""], "(", "a" * 257, "a*", "$", "(?=a)", ["a"] * 33, "\ud800"],
    "max_new_tokens": [-1, 1.0, "5", True, []],
    "min_new_tokens": [-1, 129, 1.5],
    "stop": [5, [1], ["a", None], ["x"] * 33, "", ["a", ""], {"a": 1}],
    "stop_token_ids": [[100], [-1], ["1"], 5, [1.0], [True], [[1]]],
    "n": [0, -1, 1.5, True],
    "ignore_eos": ["true", 1, 0],
    "skip_special_tokens": ["no", 0],
    "spaces_between_special_tokens": [1],
    "no_stop_trim": ["x"],
    "stream_interval": [0, -1, 0.5],
    "logit_bias": [{"100": 1.0}, {"-1": 1.0}, {"x": 1.0}, {"1": "a"}, {"1": math.inf}, [1], {"9" * 9999: 1}],
    "sampling_seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "exit_mode": ["never", 3, "OURO"],
    "min_loops": [0, 5, 1.5],
    "max_loops": [0, 5, True],
    "exit_threshold": [-0.1, 1.1, math.nan, "1"],
    "exit_trace": [5, "44", [3, 4], [4, 5], [4, 0], [4, 1.0], [4, True], [4]],
    "trace_id": [5, "unknown"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    label = "exit trace" if name == "exit_trace" and value == [4] else name
    with pytest.raises(RequestError, match=label) as refusal:
        row(**{name: value})
    assert refusal.value.status == 400
    assert len(refusal.value.message) < 300


GOOD = [
    ("temperature", 0),
    ("temperature", 100.0),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("top_k", -1),
    ("top_k", 1),
    ("top_k", 10**9),
    ("min_p", 0),
    ("min_p", 1),
    ("frequency_penalty", -2),
    ("presence_penalty", 2),
    ("repetition_penalty", 2),
    ("max_new_tokens", 0),
    ("stop", ["x"] * 32),
    ("stop", []),
    ("stop_token_ids", [0, 99]),
    ("sampling_seed", -(2**63)),
    ("sampling_seed", 2**63 - 1),
    ("exit_threshold", 0),
    ("exit_threshold", 1),
    ("min_loops", 4),
    ("max_loops", 1),
    ("regex", ""),
    ("json_schema", ""),
    ("json_schema", {"type": "string"}),
    ("regex", "a" * MAX_SOURCE_BYTES),
    ("stop_regex", []),
    ("stop_regex", ""),
    ("stop_regex", ["a{256}", "é+"]),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_edge_values_are_taken(name: str, value: Any) -> None:
    row(**{name: value})


@pytest.mark.parametrize(
    ("raw", "grammar"),
    [
        ({}, None),
        ({"regex": "", "ebnf": None, "json_schema": ""}, None),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"regex": "", "ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"json_schema": "{}"}, Grammar("json_schema", "{}")),
        ({"json_schema": {"enum": ["é"]}}, Grammar("json_schema", '{"enum":["é"]}')),
    ],
)
def test_the_grammar_of_a_request(raw: dict[str, Any], grammar: Grammar | None) -> None:
    settings = parse(**raw)
    assert settings.grammar == grammar
    assert settings.row_params(10, seed=0).constrained == (grammar is not None)


def test_grammars_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="json_schema and regex cannot both"):
        parse(regex="a", json_schema="{}")


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(RequestError, match="unknown key 'max_tokens'"):
        parse(max_tokens=5)


def test_the_output_fits_into_the_context() -> None:
    assert row(60).max_new_tokens == 4  # the default is clipped
    assert row(60, max_new_tokens=None).max_new_tokens == 4
    assert row(60, max_new_tokens=4).max_new_tokens == 4
    assert row(63, max_new_tokens=1).max_new_tokens == 1
    with pytest.raises(RequestError, match=r"max_new_tokens 5 are together 65 tokens, more than .* 64"):
        row(60, max_new_tokens=5)
    with pytest.raises(RequestError, match="prompt of 64 tokens is too long for the context length of 64"):
        row(64, max_new_tokens=0)
    with pytest.raises(RequestError, match="min_new_tokens 5"):
        row(60, min_new_tokens=5)


def test_min_new_tokens_must_leave_some_token_to_sample() -> None:
    everything = list(range(LIMITS.vocab_size))
    with pytest.raises(RequestError, match="leaves no token"):
        parse(min_new_tokens=1, stop_token_ids=everything)
    assert row(min_new_tokens=1, stop_token_ids=everything[1:], ignore_eos=True).end_ids == []
    assert row(stop_token_ids=everything).end_ids == everything
    one_left = [token_id for token_id in everything if token_id not in (0, 2, 5)]
    assert len(row(min_new_tokens=1, stop_token_ids=one_left).end_ids) == 99


def test_a_small_pool_is_told_with_both_numbers() -> None:
    small = replace(LIMITS, served_length=32)
    assert row(30, small).max_new_tokens == 2
    with pytest.raises(RequestError, match=r"prompt of 40 .* 32 tokens .* context length is 64"):
        row(40, small)


def test_end_ids() -> None:
    assert row(stop_token_ids=[9, 5, 9]).end_ids == [0, 2, 5, 9]
    assert row(stop_token_ids=[9], ignore_eos=True).end_ids == []


def test_greedy_and_top_k() -> None:
    assert row(temperature=1e-7).temperature == 0.0
    assert row(temperature=1e-6).temperature == 1e-6
    assert row(top_k=5).top_k == 5
    assert row(top_k=-1).top_k == row(top_k=100).top_k == row(top_k=10**18).top_k == 0


def test_logit_bias_is_sorted() -> None:
    checked = row(logit_bias={"20": 1, "3": -100.0})
    assert (checked.bias_ids, checked.bias_values) == ([3, 20], [-100.0, 1.0])


def test_seeds() -> None:
    seeds = random.Random(1)
    assert parse(sampling_seed=5).new_seed(seeds) == 5
    assert parse(sampling_seed=-1).new_seed(seeds) == UINT64
    first, second = parse().new_seed(seeds), parse().new_seed(seeds)
    assert first != second
    assert parse().new_seed(random.Random(1)) == first
    samples = [mix_seed(5, index) for index in range(1000)]
    assert samples[0] == 5
    assert len(set(samples)) == 1000
    assert all(0 <= seed <= UINT64 for seed in samples)
    # Sample i of one seed must not be sample j of a neighbour.
    assert not set(samples[1:]) & {mix_seed(6, index) for index in range(1, 1000)}


def test_loop_limits() -> None:
    assert (row(min_loops=2, max_loops=3).min_loops, row(min_loops=2, max_loops=3).max_loops) == (2, 3)
    with pytest.raises(RequestError, match="min_loops 3 is more than max_loops 2"):
        parse(min_loops=3, max_loops=2)


def test_server_defaults_give_way_to_the_client() -> None:
    limits = replace(LIMITS, min_loops=2, max_loops=3, exit_threshold=0.5)
    default = row(limits=limits)
    assert (default.min_loops, default.max_loops, default.exit_threshold) == (2, 3, 0.5)
    assert row(limits=limits, max_loops=1).min_loops == 1
    assert row(limits=limits, min_loops=4).max_loops == 4
    assert row(limits=limits, exit_threshold=1.0).exit_threshold == 1.0


def test_exit_modes() -> None:
    assert row(exit_mode="ouro_delayed").exit_mode == ExitMode.OURO_DELAYED
    with pytest.raises(RequestError, match="lookahead"):
        parse(exit_mode="lookahead")
    assert (
        row(limits=replace(LIMITS, has_lookahead=True), exit_mode="lookahead").exit_mode == ExitMode.LOOKAHEAD
    )


def test_traces() -> None:
    traced = row(exit_trace=[4, 1, 2, 3], max_new_tokens=3)
    assert (traced.exit_mode, traced.exit_trace, traced.max_loops) == (ExitMode.TRACE, [4, 1, 2], 4)
    assert row(trace_id="known", max_new_tokens=3).exit_trace == [4, 1, 2]
    assert row(exit_mode="trace", trace_id="known", max_new_tokens=0).exit_trace == []
    with pytest.raises(RequestError, match="holds 3 depths for 4"):
        row(trace_id="known", max_new_tokens=4)
    with pytest.raises(RequestError, match="trace_id"):
        parse(trace_id="known", exit_trace=[4])
    with pytest.raises(RequestError, match="contradicts"):
        parse(trace_id="known", exit_mode="ouro")
    for name, value in (("min_loops", 1), ("max_loops", 4), ("exit_threshold", 0.5)):
        with pytest.raises(RequestError, match=name):
            parse(exit_trace=[4], **{name: value})


def test_a_trace_server_wants_a_trace() -> None:
    limits = replace(LIMITS, exit_mode=ExitMode.TRACE)
    with pytest.raises(RequestError, match="exit_trace or trace_id"):
        parse(limits)
    assert row(limits=limits, exit_trace=[4], max_new_tokens=1).exit_trace == [4]
