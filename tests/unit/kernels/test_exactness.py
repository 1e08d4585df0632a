"""Every operation gives a row the same bits whatever stands beside it: the base of exactness.

For M = 1..33 rows, at every offset, in fp32 and bf16, against the operation on the largest batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ouro_kernels import sampling
from ouro_kernels.attention import TILE, decode_attention, prefill_attention
from ouro_kernels.elementwise import exp, log, sigmoid, silu
from ouro_kernels.exits import exit_decision, gate
from ouro_kernels.linear import linear
from ouro_kernels.norm import rms_norm
from ouro_kernels.rope import rope

ROWS = 48
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def check_rows(operation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """``operation`` on any run of rows of x equals those rows of ``operation`` on all of x."""
    whole = operation(x)
    assert torch.isfinite(whole.float()).all()
    for count in range(1, 34):
        for offset in range(0, len(x) - count + 1, 1 if count < 4 else 5):
            part = operation(x[offset : offset + count].clone())
            assert torch.equal(part, whole[offset : offset + count]), (count, offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inner", "outer"), [(64, 192), (256, 768), (704, 256), (256, 2048), (64, 259), (96, 64)]
)
def test_linear(dtype: torch.dtype, inner: int, outer: int) -> None:
    weight = torch.randn(outer, inner).to(dtype)
    check_rows(lambda x: linear(x, weight), torch.randn(ROWS, inner).to(dtype))


@pytest.mark.parametrize("count", [64, 160, 496, 512, 528])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_long_chunks(dtype: torch.dtype, count: int) -> None:
    weight, x = torch.randn(256, 256).to(dtype), torch.randn(528, 256).to(dtype)
    assert torch.equal(linear(x[:count], weight), linear(x, weight)[:count])


def test_plain_products_are_not_exact() -> None:
    """The reason for the padding; should this ever fail, the padding can go."""
    weight, x = torch.randn(768, 256), torch.randn(16, 256)
    assert not torch.equal(
        torch.nn.functional.linear(x[:1], weight), torch.nn.functional.linear(x, weight)[:1]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100, 256, 2048])
def test_norm_and_gate(dtype: torch.dtype, width: int) -> None:
    weight = torch.randn(width).to(dtype)
    x = torch.randn(ROWS, width).to(dtype)
    check_rows(lambda rows: rms_norm(rows, weight, 1e-6), x)
    check_rows(lambda rows: gate(rows, weight.float(), torch.tensor(0.3)), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_silu(dtype: torch.dtype) -> None:
    cos, sin = torch.randn(2, ROWS, 16).to(dtype)
    x = torch.randn(ROWS, 3 * 32 + 32).to(dtype)

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        angles = rows[:, -32:]
        return rope(rows[:, :-32].reshape(-1, 3, 32), angles[:, :16], angles[:, 16:])

    x[:, -32:-16], x[:, -16:] = cos, sin
    check_rows(rotate, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 37, 96])
def test_elementwise(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(ROWS, width).to(dtype)
    for function in (exp, sigmoid, silu, lambda rows: log(rows.abs() + 1e-3)):
        check_rows(function, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [259, 2048])
def test_sampling(dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(ROWS, width).to(dtype).float() * 3
    check_rows(sampling.log_softmax, logits)
    column = torch.rand(ROWS, 1)
    x = torch.cat((logits, column), 1)

    def filtered(rows: torch.Tensor) -> torch.Tensor:
        share = rows[:, -1]
        kept = sampling.filter_logits(rows[:, :-1], (share * 50).long(), share, share / 5)
        return kept.masked_fill(kept == -torch.inf, -1e9)

    check_rows(filtered, x)
    check_rows(
        lambda rows: sampling.sample(rows[:, :-1], (rows[:, -1] * 1e9).long(), (rows[:, 0] * 100).long()), x
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (4, 2, 16), (4, 1, 32)])
def test_decode_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Any lanes together, any padding of the table, any slots, poison in every slot that is not theirs."""
    lanes, longest = 12, 5 * TILE
    lengths = torch.tensor([1, 2, 63, 64, 65, 127, 128, 129, 200, 256, 257, 320])
    slots = torch.randperm(lanes * longest).view(lanes, longest)
    keys = torch.randn(lanes * longest, kv_heads, head_dim).to(dtype)
    values = torch.randn(lanes * longest, kv_heads, head_dim).to(dtype)
    visible = torch.arange(longest) < lengths.unsqueeze(1)
    keys[slots[~visible]] = torch.nan
    values[slots[~visible]] = torch.nan
    table = torch.where(visible, slots, slots[:, :1])
    query = torch.randn(lanes, heads, head_dim).to(dtype)
    whole = decode_attention(query, keys, values, table, lengths, head_dim**-0.5)
    assert torch.isfinite(whole.float()).all()
    for count in range(1, lanes + 1):
        for offset in range(lanes - count + 1):
            lane = slice(offset, offset + count)
            width = -(-int(lengths[lane].max()) // TILE) * TILE
            part = decode_attention(
                query[lane], keys, values, table[lane, :width], lengths[lane], head_dim**-0.5
            )
            assert torch.equal(part, whole[lane]), (count, offset)
    # the same keys under other slot numbers
    shuffle = torch.randperm(lanes * longest)
    moved_keys, moved_values = torch.empty_like(keys), torch.empty_like(values)
    moved_keys[shuffle], moved_values[shuffle] = keys, values
    moved = decode_attention(query, moved_keys, moved_values, shuffle[table], lengths, head_dim**-0.5)
    assert torch.equal(moved, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (2, 1, 16), (2, 2, 8)])
def test_decode_attention_of_one_lane_of_a_small_model(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """So few numbers that torch has another kernel for them, whose bits differ once in many calls."""
    lanes = 2000
    keys, values = torch.randn(2, 4096, kv_heads, head_dim).to(dtype)
    query = torch.randn(lanes, heads, head_dim).to(dtype)
    table, lengths = torch.randint(4096, (lanes, TILE)), torch.randint(1, TILE + 1, (lanes,))
    whole = decode_attention(query, keys, values, table, lengths, head_dim**-0.5)
    for lane in range(lanes):
        own = slice(lane, lane + 1)
        part = decode_attention(query[own], keys, values, table[own], lengths[own], head_dim**-0.5)
        assert torch.equal(part, whole[own]), lane


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (4, 2, 16)])
def test_prefill_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Any chunk of a row equals those positions of the whole row at once."""
    length = 200
    slots = torch.randperm(length)
    keys = torch.randn(length, kv_heads, head_dim).to(dtype)
    values = torch.randn(length, kv_heads, head_dim).to(dtype)
    query = torch.randn(length, heads, head_dim).to(dtype)
    whole = prefill_attention(query, keys, values, slots, 0, head_dim**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1)[None],
        keys[slots].float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1)[None],
        values[slots].float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1)[None],
        is_causal=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(
        whole.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )
    for count in [*range(1, 34), 64, 100]:
        for start in range(0, length - count + 1, 7):
            end = start + count
            part = prefill_attention(query[start:end], keys, values, slots[:end], start, head_dim**-0.5)
            assert torch.equal(part, whole[start:end]), (count, start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_agrees_with_prefill(dtype: torch.dtype) -> None:
    """Two families of kernels: close, not bit-identical."""
    length, heads, head_dim = 150, 4, 32
    slots = torch.randperm(length)
    keys, values = torch.randn(2, length, heads, head_dim).to(dtype)
    query = torch.randn(length, heads, head_dim).to(dtype)
    prefill = prefill_attention(query, keys, values, slots, 0, head_dim**-0.5)
    table = torch.zeros(length, 3 * TILE, dtype=torch.int64)
    table[:, :length] = slots
    decode = decode_attention(query, keys, values, table, torch.arange(1, length + 1), head_dim**-0.5)
    torch.testing.assert_close(
        decode.float(), prefill.float(), atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )


def decide(
    mode: int,
    hazards: list[float],
    looks: list[float],
    low: int,
    high: int,
    q: float,
    traced: int = 0,
    replayed: bool = False,
) -> int:
    """Loops that one token runs, T = len(hazards)."""
    survival, pending = torch.ones(1), torch.zeros(1, dtype=torch.bool)
    for loop, (hazard, look) in enumerate(zip(hazards, looks, strict=True), 1):
        leave, survival, pending = exit_decision(
            torch.tensor([mode]),
            torch.tensor([loop]),
            torch.tensor([hazard]),
            torch.tensor([look]),
            survival,
            pending,
            torch.tensor([low]),
            torch.tensor([high]),
            torch.tensor([q]),
            torch.tensor([traced]),
            torch.tensor([replayed]),
            len(hazards),
        )
        if bool(leave):
            return loop
    raise AssertionError("the token never left")


NO = [0.0] * 4


@pytest.mark.parametrize(
    ("mode", "hazards", "looks", "low", "high", "q", "depth"),
    [
        (0, [0.3, 0.3, 0.3, 0.3], NO, 1, 4, 0.5, 2),  # F = .3, .51
        (1, [0.3, 0.3, 0.3, 0.3], NO, 2, 4, 0.5, 3),  # the same decision, one loop later
        (0, [0.9, 0.0, 0.0, 0.0], NO, 3, 4, 0.5, 3),  # hazards below min_loops count
        (1, [0.9, 0.0, 0.0, 0.0], NO, 3, 4, 0.5, 4),  # delayed triggers at min_loops at the earliest
        (0, [0.0, 0.0, 0.0, 0.0], NO, 1, 3, 0.5, 3),
        (0, [1.0, 1.0, 1.0, 1.0], NO, 1, 4, 1.0, 4),  # q >= 1 is "never early"
        (1, [1.0, 1.0, 1.0, 1.0], NO, 1, 4, 1.0, 4),
        (0, [0.0, 0.0, 0.0, 0.0], NO, 1, 4, 0.0, 1),
        (1, [1.0, 1.0, 1.0, 1.0], NO, 1, 1, 0.5, 1),  # max_loops wins
        (2, NO, [0.6, 0.0, 0.0, 0.0], 1, 4, 0.5, 2),
        (3, NO, [0.6, 0.0, 0.0, 0.0], 3, 4, 0.5, 4),  # would leave at 2 < min_loops
        (3, NO, [0.6, 0.6, 0.0, 0.0], 3, 4, 0.5, 3),
        (2, NO, [0.6, 0.0, 0.0, 0.0], 1, 1, 0.5, 1),
        (2, NO, [0.9, 0.9, 0.9, 0.9], 1, 4, 1.0, 4),
        (3, NO, [0.1, 0.1, 0.1, 0.1], 1, 3, 0.5, 3),
    ],
)
def test_exit_policies(
    mode: int, hazards: list[float], looks: list[float], low: int, high: int, q: float, depth: int
) -> None:
    assert decide(mode, hazards, looks, low, high, q) == depth


@pytest.mark.parametrize("traced", [1, 2, 3, 4])
def test_trace_needs_no_gate(traced: int) -> None:
    assert decide(4, [1.0] * 4, [1.0] * 4, 1, 4, 0.5, traced) == traced


@pytest.mark.parametrize("mode", range(5))
@pytest.mark.parametrize("traced", [1, 2, 3, 4])
def test_a_replayed_token_leaves_where_it_left(mode: int, traced: int) -> None:
    """Against limits, triggers and thresholds."""
    assert decide(mode, [1.0] * 4, [1.0] * 4, 2, 2, 0.0, traced, replayed=True) == traced
    assert decide(mode, NO, NO, 1, 4, 0.5, traced, replayed=True) == traced
