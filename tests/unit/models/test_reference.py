"""The reference model against a second, independent formulation and against script models.

The oracle here is numpy in float64, one position at a time, with K and V kept for every
(loop, layer, position) and the reading rule spelled out; the reference runs loop by loop over all
positions and overwrites one table. They share no code.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ouro_sgl.messages import ExitMode, RowParams
from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.reference import ExitRule, ReferenceModel
from ouro_sgl.models.weights import Weights, load_weights, random_lookahead_head
from tests.models import byte_ids, chain_of, rand_checkpoint, script_checkpoint

GATE_MODES = (ExitMode.OURO, ExitMode.OURO_DELAYED)
LOOKAHEAD_MODES = (ExitMode.RANDOM_LOOKAHEAD, ExitMode.LOOKAHEAD)


def load(path: Path) -> tuple[OuroConfig, Weights]:
    config = load_config(path)
    return config, load_weights(path, config, torch.float32, "cpu")


class Oracle:
    """States of one row in float64: ``state[p]`` is where position p left after ``depths[p]`` loops."""

    def __init__(self, config: OuroConfig, weights: Weights) -> None:
        self.config = config
        self.w = {name: tensor.double().numpy() for name, tensor in weights.items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + self.config.rms_norm_eps) * self.w[name]

    def rotate(self, heads: np.ndarray, position: int) -> np.ndarray:
        out = np.empty_like(heads)
        half = self.config.head_dim // 2
        for i in range(half):
            angle = position * self.config.rope_theta ** (-2.0 * i / self.config.head_dim)
            a, b = heads[:, i], heads[:, i + half]
            out[:, i] = a * np.cos(angle) - b * np.sin(angle)
            out[:, i + half] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def run(self, ids: list[int], prompt_len: int, depths: list[int], layout: str) -> list[np.ndarray]:
        c, w = self.config, self.w
        kv: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}  # (loop, layer, position)
        states = []
        for p, token in enumerate(ids):
            x = w["model.embed_tokens.weight"][token]
            for loop in range(1, depths[p] + 1):
                for layer in range(c.num_layers):
                    n = f"model.layers.{layer}."
                    y = self.norm(x, n + "input_layernorm.weight")
                    q, k, v = (
                        (w[n + f"self_attn.{part}_proj.weight"] @ y).reshape(-1, c.head_dim) for part in "qkv"
                    )
                    q = self.rotate(q, p)
                    kv[loop, layer, p] = (self.rotate(k, p), v)
                    read = []
                    for j in range(p + 1):
                        if p < prompt_len or j == p:
                            source = loop
                        else:
                            source = min(loop, depths[j]) if layout == "last_exited" else depths[j]
                        read.append(kv[source, layer, j])
                    heads = []
                    for h in range(c.num_heads):
                        g = h // (c.num_heads // c.num_kv_heads)
                        scores = np.array([k_j[g] @ q[h] for k_j, _ in read]) / np.sqrt(c.head_dim)
                        probs = np.exp(scores - scores.max())
                        probs /= probs.sum()
                        heads.append(sum(pr * v_j[g] for pr, (_, v_j) in zip(probs, read, strict=True)))
                    y = w[n + "self_attn.o_proj.weight"] @ np.concatenate(heads)
                    x = x + self.norm(y, n + "input_layernorm_2.weight")
                    y = self.norm(x, n + "post_attention_layernorm.weight")
                    gate = w[n + "mlp.gate_proj.weight"] @ y
                    up = w[n + "mlp.up_proj.weight"] @ y
                    y = w[n + "mlp.down_proj.weight"] @ (gate / (1.0 + np.exp(-gate)) * up)
                    x = x + self.norm(y, n + "post_attention_layernorm_2.weight")
                x = self.norm(x, "model.norm.weight")
            states.append(x)
        return states


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_logits_equal_the_oracle_under_traced_depths(tmp_path: Path, layout: str) -> None:
    config, weights = load(rand_checkpoint(tmp_path))
    prompt = byte_ids("looped")
    trace = [4, 1, 3, 2, 4, 1, 2]
    params = RowParams(max_new_tokens=len(trace), exit_mode=ExitMode.TRACE, exit_trace=trace)
    output = ReferenceModel(config, weights).generate(prompt, params, layout)
    assert output.exit_depths == trace
    assert output.scores == [[]] * len(trace)
    ids = prompt + output.output_ids[:-1]
    states = Oracle(config, weights).run(ids, len(prompt), [4] * len(prompt) + trace[1:], layout)
    expected = np.stack(states) @ weights["lm_head.weight"].double().numpy().T
    np.testing.assert_allclose(output.prompt_logits.numpy(), expected[: len(prompt)], atol=2e-3)
    np.testing.assert_allclose(output.logits.numpy(), expected[len(prompt) - 1 :], atol=2e-3)


def test_layouts_and_depths_matter(tmp_path: Path) -> None:
    """The comparison above would be worth nothing if every rule gave the same logits."""
    config, weights = load(rand_checkpoint(tmp_path))
    model = ReferenceModel(config, weights)
    forced = byte_ids("abcde")
    outputs = []
    for layout, trace in [
        ("last_exited", [4, 1, 2, 1, 3]),
        ("shared", [4, 1, 2, 1, 3]),
        ("last_exited", [4, 2, 2, 1, 3]),
    ]:
        params = RowParams(max_new_tokens=5, exit_mode=ExitMode.TRACE, exit_trace=trace)
        outputs.append(model.generate(byte_ids("looped"), params, layout, forced).logits[-1])
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
    assert (outputs[0] - outputs[2]).abs().max() > 1e-2


def test_exit_depths_feed_back_as_a_trace(tmp_path: Path) -> None:
    config, weights = load(rand_checkpoint(tmp_path))
    model = ReferenceModel(config, weights)
    params = RowParams(max_new_tokens=12, exit_threshold=0.7)
    for layout in ("last_exited", "shared"):
        output = model.generate(byte_ids("some prompt"), params, layout)
        assert len(set(output.exit_depths[1:])) > 1
        trace = RowParams(max_new_tokens=12, exit_mode=ExitMode.TRACE, exit_trace=output.exit_depths)
        again = model.generate(byte_ids("some prompt"), trace, layout)
        assert again.output_ids == output.output_ids
        assert torch.equal(again.logits, output.logits)


@pytest.mark.parametrize("mode", list(ExitMode)[:4])
def test_shared_equals_last_exited_at_one_depth_for_all(tmp_path: Path, mode: ExitMode) -> None:
    """Where no loop is skipped and none is read below the last, there is one K/V: T = 1."""
    config, weights = load(rand_checkpoint(tmp_path, total_loops=1))
    model = ReferenceModel(config, weights, lookahead=random_lookahead_head(1, config.hidden_size))
    params = RowParams(max_new_tokens=6, max_loops=1, exit_threshold=0.5, exit_mode=mode)
    first, second = (model.generate(byte_ids("xyz"), params, layout) for layout in ("last_exited", "shared"))
    assert first.output_ids == second.output_ids
    torch.testing.assert_close(first.logits, second.logits, atol=1e-4, rtol=0)
    assert first.exit_depths == [1] * 6


# --------------------------------------------------------------------------- exit rules

# A state [1.0] under weight [logit] has the hazard sigmoid(logit).


def depth_of(mode: ExitMode, hazards: list[float], *, q: float, low: int = 1, high: int = 4) -> int:
    """Loops run by a token whose gate (or head) gives these hazards, one per loop."""
    params = RowParams(max_new_tokens=9, exit_mode=mode, exit_threshold=q, min_loops=low, max_loops=high)
    rule = ExitRule(params, len(hazards), (torch.ones(1), torch.zeros(())))
    for loop, hazard in enumerate(hazards, 1):
        if rule.leaves(loop, torch.logit(torch.tensor([hazard], dtype=torch.float64)).float()):
            return loop
    raise AssertionError("never left")


def test_delayed_takes_one_more_loop() -> None:
    hazards = [0.3, 0.3, 0.3, 0.3]  # F = .3, .51, .657, 1
    assert depth_of(ExitMode.OURO, hazards, q=0.5, low=2) == 2
    assert depth_of(ExitMode.OURO_DELAYED, hazards, q=0.5, low=2) == 3


@pytest.mark.parametrize(
    ("q", "low", "high", "expected"),
    [
        (0.25, 1, 4, 1),
        (0.35, 1, 4, 2),
        (0.6, 1, 4, 3),
        (0.7, 1, 4, 4),
        (0.25, 3, 4, 3),  # hazards below min_loops count, but nothing leaves there
        (0.6, 2, 2, 2),  # max_loops wins over the threshold
        (0.0, 1, 4, 1),
        (1.0, 1, 4, 4),
        (1.0, 1, 3, 3),
        (0.0, 4, 4, 4),
    ],
)
def test_ouro(q: float, low: int, high: int, expected: int) -> None:
    assert depth_of(ExitMode.OURO, [0.3] * 4, q=q, low=low, high=high) == expected


@pytest.mark.parametrize(
    ("q", "low", "high", "expected"),
    [
        (0.25, 1, 4, 2),
        (0.35, 1, 4, 3),
        (0.6, 1, 4, 4),
        (0.25, 2, 4, 3),  # triggers only from min_loops on
        (0.25, 3, 4, 4),
        (0.25, 1, 1, 1),  # max_loops wins
        (0.0, 1, 4, 2),
        (1.0, 1, 4, 4),
    ],
)
def test_ouro_delayed(q: float, low: int, high: int, expected: int) -> None:
    assert depth_of(ExitMode.OURO_DELAYED, [0.3] * 4, q=q, low=low, high=high) == expected


@pytest.mark.parametrize("mode", LOOKAHEAD_MODES)
@pytest.mark.parametrize(
    ("scores", "low", "high", "expected"),
    [
        ([0.9, 0.1, 0.1, 0.1], 1, 4, 2),  # never before loop 2
        ([0.1, 0.9, 0.1, 0.1], 1, 4, 3),
        ([0.1, 0.1, 0.9, 0.1], 1, 4, 4),
        ([0.4, 0.4, 0.4, 0.4], 1, 4, 4),  # nothing adds up over the loops
        ([0.9, 0.1, 0.1, 0.1], 2, 4, 2),  # leaving at 2 respects min_loops 2
        ([0.9, 0.1, 0.1, 0.1], 3, 4, 4),  # a trigger too early is gone
        ([0.9, 0.9, 0.1, 0.1], 3, 4, 3),
        ([0.9, 0.9, 0.9, 0.9], 1, 1, 1),
    ],
)
def test_lookahead(mode: ExitMode, scores: list[float], low: int, high: int, expected: int) -> None:
    assert depth_of(mode, scores, q=0.5, low=low, high=high) == expected


@pytest.mark.parametrize("mode", list(ExitMode)[:4])
def test_threshold_one_switches_every_policy_off(mode: ExitMode) -> None:
    assert depth_of(mode, [1 - 1e-9] * 4, q=1.0) == 4


def test_scores_are_the_cdf_in_fp32() -> None:
    rule = ExitRule(RowParams(max_new_tokens=1), 4, (torch.ones(1), torch.zeros(())))
    for loop in range(1, 5):
        rule.leaves(loop, torch.logit(torch.tensor([0.25])))
    assert rule.scores == pytest.approx([0.25, 0.4375, 0.578125, 1.0], abs=1e-6)


# --------------------------------------------------------------------------- generating


def test_script_model_answers_its_chain(tmp_path: Path) -> None:
    chain = chain_of([*byte_ids("x"), *byte_ids("abcdef"), 0])
    hazards = {3 + ord("b"): 0.9, 3 + ord("c"): 0.1}
    config, weights = load(script_checkpoint(tmp_path, chain, hazards=hazards))
    params = RowParams(max_new_tokens=20, exit_threshold=0.6, end_ids=list(config.end_ids))
    output = ReferenceModel(config, weights).generate(byte_ids("Hello x"), params)
    assert output.output_ids == [*byte_ids("abcdef"), 0]
    # Entry i is the depth of the token before output i: x (prompt: T), a, b, c, d, e, f.
    assert output.exit_depths == [4, 2, 1, 4, 2, 2, 2]
    assert output.scores[3] == pytest.approx([0.1, 0.19, 0.271, 1.0], abs=1e-3)


def test_first_output_reports_full_depth_under_max_loops(tmp_path: Path) -> None:
    config, weights = load(script_checkpoint(tmp_path, chain_of(byte_ids("abcd"))))
    output = ReferenceModel(config, weights).generate(byte_ids("a"), RowParams(max_new_tokens=3, max_loops=2))
    assert output.exit_depths == [4, 2, 2]


def test_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    config, weights = load(script_checkpoint(tmp_path, {10: [77, 55, 66]}))
    output = ReferenceModel(config, weights).generate([10], RowParams(max_new_tokens=1))
    assert output.output_ids == [55]


def test_length_zero_gives_prompt_logits_only(tmp_path: Path) -> None:
    config, weights = load(script_checkpoint(tmp_path, {}))
    output = ReferenceModel(config, weights).generate(byte_ids("abc"), RowParams(max_new_tokens=0))
    assert output.output_ids == []
    assert output.prompt_logits.shape == (3, config.vocab_size)


def test_unknown_layout_is_refused(tmp_path: Path) -> None:
    config, weights = load(script_checkpoint(tmp_path, {}))
    with pytest.raises(ValueError, match="ring"):
        ReferenceModel(config, weights).generate([5], RowParams(max_new_tokens=1), "ring")
