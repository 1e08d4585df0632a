"""Sampling and the coda's row list by the Triton kernels under Triton's interpreter.

A pytest file, run in a child process by test_interpreted.py; by hand: TRITON_INTERPRET=1. Whole
rounds (interpreted_round.py) have a vocabulary of one block; here it has several, the last one partial.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
import triton
from ouro_kernels.triton_ops import sampling, state
from torch import Tensor

from ouro_sgl.worker.rows import Rows, RowState
from ouro_sgl.worker.sampler import LogprobWish, Sampler

# numpy warns of infinities and NaN that a mask throws away
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.timeout(600)]

V, BLOCK, SELECT_BLOCK = 300, 64, 128
TOTAL_LOOPS = 4


def ints(*shape: int) -> Tensor:
    return torch.full(shape, -9, dtype=torch.int32)


def numbers(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


@dataclass
class Kernels:
    """What the two kernels left for the exited rows; logits are those after processing."""

    logits: Tensor
    tokens: Tensor
    logprobs: Tensor
    log_sums: Tensor
    bad: Tensor


def by_kernels(rows: Rows, logits: Tensor, ready: list[int], bucket: int) -> Kernels:
    """logits [M, vocabulary] of the rows ``ready``; launched for ``bucket`` rows, as a round would be."""
    vocabulary = logits.shape[1]
    blocks = triton.cdiv(vocabulary, BLOCK)
    exits = ints(bucket)
    exits[: len(ready)] = torch.tensor(ready, dtype=torch.int32)
    count = torch.tensor([len(ready)], dtype=torch.int32)
    processed = numbers(bucket, vocabulary)
    processed[: len(ready)] = logits
    best, total, drawn = (numbers(bucket, blocks) for _ in range(3))
    best_id, drawn_id, block_bad = (ints(bucket, blocks) for _ in range(3))
    found = Kernels(processed, ints(bucket), numbers(bucket), numbers(bucket), ints(bucket))
    sampling.process_kernel[(bucket, blocks)](
        processed,
        exits,
        count,
        rows.position,
        rows.prompt_length,
        rows.temperature,
        rows.seed,
        rows.min_new_tokens,
        rows.penalised,
        rows.frequency,
        rows.presence,
        rows.repetition,
        rows.output_counts,
        rows.prompt_seen,
        rows.constrained,
        rows.mask,
        rows.biased,
        rows.bias,
        rows.is_end,
        best,
        best_id,
        total,
        drawn,
        drawn_id,
        block_bad,
        vocabulary,
        blocks,
        BV=BLOCK,
    )
    sampling.select_kernel[(bucket,)](
        processed,
        exits,
        count,
        rows.position,
        rows.prompt_length,
        rows.temperature,
        rows.seed,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        best,
        best_id,
        total,
        drawn,
        drawn_id,
        block_bad,
        found.tokens,
        found.logprobs,
        found.log_sums,
        found.bad,
        vocabulary,
        blocks,
        BLOCKS=triton.next_power_of_2(blocks),
        BV=SELECT_BLOCK,
    )
    return found


# by row: columns of ``Rows`` that differ from a greedy row's
SETTINGS: list[dict[str, float]] = [
    {},
    {},
    {"temperature": 1.0, "seed": -3},
    {"temperature": 0.8, "seed": 5, "top_k": 5},
    {"temperature": 1.3, "seed": 6, "top_p": 0.6},
    {"temperature": 0.7, "seed": 7, "min_p": 0.3},
    {"temperature": 1.1, "seed": 8, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "seed": 9, "top_k": 1},
    {"penalised": 1, "frequency": 1.5, "presence": 0.5, "repetition": 1.7},
    {"penalised": 1, "frequency": -0.5, "repetition": 0.8, "temperature": 1.0, "seed": 1, "top_p": 0.9},
    {"constrained": 1},
    {"constrained": 1, "temperature": 1.0, "seed": 2},
    {"constrained": 1, "temperature": 1.0, "seed": 3, "top_k": 12, "top_p": 0.9},
    {"biased": 1},
    {"biased": 1, "temperature": 2.0, "seed": 4, "top_k": 250},
    {"min_new_tokens": 100},
    {"min_new_tokens": 100, "temperature": 1.0, "seed": 10, "penalised": 1, "repetition": 1.2, "biased": 1},
    {"temperature": 1.0, "seed": 11},
    {"top_k": 3, "temperature": 1.0, "seed": 12},
]
BAD = [17, 18]  # rows whose logits get a NaN or an infinity


def settled_rows() -> Rows:
    count = len(SETTINGS)
    rows = Rows(count, 64, TOTAL_LOOPS, V, 16, torch.float32, torch.device("cpu"))
    rows.top_p.fill_(1.0)
    rows.repetition.fill_(1.0)
    for row, columns in enumerate(SETTINGS):
        for name, value in columns.items():
            getattr(rows, name)[row] = value
    rows.prompt_length.copy_(torch.randint(1, 20, (count,)))
    rows.position.copy_(rows.prompt_length + torch.randint(-1, 30, (count,)))
    rows.output_counts.copy_(torch.randint(0, 40, (count, V)).clamp_min(36) - 36)
    rows.prompt_seen.copy_(torch.rand(count, V) < 0.2)
    rows.is_end.copy_(torch.rand(count, V) < 0.3)
    rows.bias.copy_(torch.randn(count, V) * 3)
    rows.mask.copy_(torch.randint(-(2**31), 2**31, rows.mask.shape))
    rows.mask[11] = 0
    rows.mask[11, 9] = -1  # ids 288 and up: whole blocks without a token
    return rows


@pytest.mark.parametrize("seed", range(2))
def test_sampling_with_several_vocabulary_blocks(seed: int) -> None:
    torch.manual_seed(seed)
    rows = settled_rows()
    logits = torch.randn(len(SETTINGS), V) * 2
    # values that repeat within blocks and across them: of equals the lowest id, at every cut
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[1, [250, 70, 199]] = 20.0
    logits[BAD[0], 100], logits[BAD[1], 299] = torch.nan, torch.inf
    everyone = list(range(len(SETTINGS)))
    wishes = {row: LogprobWish(0, ()) for row in everyone}
    expected = Sampler(rows).run(logits.clone(), torch.tensor(everyone), wishes)
    got = by_kernels(rows, logits, everyone, len(everyone) + 2)

    assert (got.bad[:-2] == 0).tolist() == expected.finite.tolist()
    good = [row for row in everyone if row not in BAD]
    assert got.tokens[good].tolist() == expected.token_ids[good].tolist()
    assert int(got.tokens[1]) == 70
    logprobs = torch.tensor([expected.logprobs[row] for row in good])
    torch.testing.assert_close(got.logprobs[good], logprobs, atol=1e-5, rtol=1e-5)
    sums = torch.logsumexp(got.logits[good], -1)
    torch.testing.assert_close(got.log_sums[good], sums, atol=1e-5, rtol=1e-5)
    assert ((got.tokens[:-2] >= 0) & (got.tokens[:-2] < V)).all()  # bad rows index with it too
    assert (got.tokens[-2:] == -9).all()  # places past the count are left alone
    assert got.logprobs[-2:].isnan().all()

    some = good[1::5]
    alone = by_kernels(rows, logits[some], some, len(some))
    assert torch.equal(alone.tokens, got.tokens[some])
    assert torch.equal(alone.logprobs, got.logprobs[some])


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.65)])
def test_of_equal_values_at_the_cut_the_lowest_ids_stay(top_k: int, top_p: float) -> None:
    """Probabilities: one of 0.4, six of 0.1, in both blocks of the selection."""
    count, width = 10, 150
    rows = Rows(count, 64, TOTAL_LOOPS, width, 16, torch.float32, torch.device("cpu"))
    rows.temperature.fill_(1.0)
    rows.repetition.fill_(1.0)
    rows.top_k.fill_(top_k)
    rows.top_p.fill_(top_p)
    rows.seed.copy_(torch.arange(count))
    logits = torch.full((count, width), -40.0)
    tied = [10, 127, 128, 129, 140, 149]
    logits[:, tied] = 0.0
    logits[:, 60] = math.log(4)
    stays = {60, *tied[: 2 if top_k == 3 else 3]}
    ready = list(range(count))
    expected = Sampler(rows).run(logits.clone(), torch.tensor(ready), {}).token_ids
    got = by_kernels(rows, logits, ready, count).tokens
    assert got.tolist() == expected.tolist()
    assert set(got.tolist()) <= stays


@pytest.mark.parametrize("width", [300, 5000, 8192])
def test_log_sum_exp(width: int) -> None:
    logits = torch.randn(4, width) * 5
    logits[1, : width // 2] = -torch.inf
    logits[2, 3] = 500.0
    whole = sampling.log_sum_exp(logits)
    torch.testing.assert_close(whole, torch.logsumexp(logits, -1), atol=1e-5, rtol=1e-5)
    assert torch.equal(sampling.log_sum_exp(logits[2:3]), whole[2:3])


def test_begin_coda_waits_for_enough_rows() -> None:
    """All that are ready leave once they are enough, or one has waited T rounds, or no lane ran."""
    pick = random.Random(0)
    count, went = 11, 0
    for _ in range(60):
        states = [pick.choice([*RowState, RowState.CODA]) for _ in range(count)]
        positions = [pick.randrange(30) for _ in range(count)]
        waits = [pick.choice([0, 0, 0, 1, 2, 3]) for _ in range(count)]
        constrained = [pick.choice([0, 1]) for _ in range(count)]
        masks = [position + pick.choice([0, 0, -1]) for position in positions]
        replays = [position + pick.choice([0, -1, 1]) for position in positions]
        lanes, enough = pick.choice([0, 3, 3, 3]), pick.randint(1, 6)
        ready = [
            row
            for row in range(count)
            if states[row] == RowState.CODA
            and (not constrained[row] or masks[row] == positions[row] or positions[row] < replays[row])
        ]
        longest = max((waits[row] + 1 for row in ready), default=0)
        go = len(ready) >= enough or lanes == 0 or longest >= TOTAL_LOOPS
        went += go

        waited, exits, exit_count = torch.tensor(waits), ints(count), ints(1)
        state.begin_coda_kernel[(1,)](
            torch.tensor([int(value) for value in states]),
            torch.tensor(positions),
            waited,
            *(torch.tensor(column) for column in (constrained, masks, replays)),
            torch.tensor([lanes], dtype=torch.int32),
            exits,
            exit_count,
            count,
            enough,
            T=TOTAL_LOOPS,
            BR=16,
        )
        assert int(exit_count) == (len(ready) if go else 0)
        assert exits.tolist() == ready + [-9] * (count - len(ready))
        assert waited.tolist() == [wait + (row in ready) for row, wait in enumerate(waits)]
    assert 0 < went < 60
