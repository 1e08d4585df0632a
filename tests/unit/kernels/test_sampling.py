"""The sampler's stages against plain formulas."""

from __future__ import annotations

import pytest
import torch
from ouro_kernels import sampling


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_uniform_depends_on_seed_and_counter_alone_and_is_uniform() -> None:
    seeds, counters = torch.tensor([1, 1, 2, -5]), torch.tensor([0, 1, 0, 0])
    numbers = sampling.uniform(seeds, counters, 50_000)
    assert torch.equal(sampling.uniform(seeds[2:3], counters[2:3], 50_000), numbers[2:3])
    assert (numbers > 0).all()
    assert (numbers < 1).all()
    assert numbers.mean(1) == pytest.approx([0.5] * 4, abs=0.01)
    assert numbers.var(1) == pytest.approx([1 / 12] * 4, abs=0.005)
    assert torch.corrcoef(numbers).fill_diagonal_(0).abs().max() < 0.03


def test_sample_follows_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).repeat(20_000, 1)
    drawn = sampling.sample(logits, torch.full((20_000,), 7), torch.arange(20_000))
    frequency = torch.bincount(drawn, minlength=4) / 20_000
    assert frequency == pytest.approx(torch.softmax(logits[0], 0), abs=0.015)


def test_penalties() -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]])
    counts = torch.tensor([[3, 0, 1, 0]], dtype=torch.int32)
    seen = torch.tensor([[False, True, False, False]])
    got = sampling.apply_penalties(logits, counts, seen, one(0.5), one(0.25), one(2.0))
    # id 0: 2 - 1.5 - .25 = .25, / 2; id 1: only in the prompt, / 2; id 2: -2 - .5 - .25, * 2
    assert got.tolist() == [[0.125, 1.0, -5.5, 2.0]]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3]),
        (2, 1.0, 0.0, [0, 1]),
        (0, 0.5, 0.0, [0]),  # the first holds .5: mass in front of the second does not exceed .5
        (0, 0.75, 0.0, [0, 1]),
        (0, 1e-6, 0.0, [0]),
        (0, 1.0, 0.5, [0, 1]),
        (3, 0.9, 0.1, [0, 1, 2]),
    ],
)
def test_filters(top_k: int, top_p: float, min_p: float, kept: list[int]) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    got = sampling.filter_logits(logits, torch.tensor([top_k]), one(top_p), one(min_p))
    got_kept = torch.isfinite(got[0]).nonzero().squeeze(1).tolist()
    if (top_p, top_k) == (0.5, 0):
        assert got_kept in ([0], [0, 1])  # .5 in fp32 may fall on either side
    else:
        assert got_kept == kept


def test_ties_stay_with_the_lowest_id() -> None:
    logits = torch.zeros(1, 6)
    got = sampling.filter_logits(logits, torch.tensor([2]), one(1.0), one(0.0))
    assert torch.isfinite(got[0]).nonzero().squeeze(1).tolist() == [0, 1]


def test_log_softmax() -> None:
    logits = torch.randn(4, 259, generator=torch.Generator().manual_seed(0)) * 5
    torch.testing.assert_close(sampling.log_softmax(logits), torch.log_softmax(logits, -1))
