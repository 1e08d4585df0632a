"""Triton kernels against their plain-torch twins on random inputs, outputs poisoned beforehand."""

from __future__ import annotations

import pytest
import torch
from ouro_kernels.norm import rms_norm
from ouro_kernels.triton_ops import attention
from ouro_kernels.triton_ops.attention import WorkList

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|; NaN when anything is unwritten."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-2 if dtype == torch.bfloat16 else 1e-5


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "inner", "splits"), [(6144, 2048, 1), (2048, 5632, 2), (259, 64, 1)])
def test_linear_is_right_and_the_same_at_every_row_count(
    dtype: torch.dtype, columns: int, inner: int, splits: int
) -> None:
    from ouro_kernels.triton_ops import gemm

    weight = (torch.randn(columns, inner, device="cuda") / inner**0.5).to(dtype)
    x = torch.randn(128, inner, device="cuda").to(dtype)
    narrow = dtype == torch.float32
    reference = None
    for rows, block_m, swap in (
        (128, 128, False),
        (64, 64, False),
        (32, 32, True),
        (16, 16, True),
        (1, 16, True),
    ):
        block = min(block_m, 32) if narrow else block_m
        tile = gemm.GemmTile(64, 32 if narrow else min(128, inner // splits), 4, 2, swap and not narrow)
        out = poisoned(splits, rows, columns, dtype=torch.float32)
        gemm.linear(x[:rows], weight, out, tile, block, splits)
        if reference is None:
            reference = out
            assert relative_error(out, gemm.linear_twin(x, weight, splits)) < tolerance(dtype)
        else:
            assert torch.equal(out, reference[:, :rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows_past_the_count_are_left_alone(dtype: torch.dtype) -> None:
    from ouro_kernels.triton_ops import gemm

    weight, x = torch.randn(300, 64, device="cuda").to(dtype), torch.randn(20, 64, device="cuda").to(dtype)
    index = torch.tensor([17, 3, 5, 0], dtype=torch.int32, device="cuda")
    count = torch.tensor([3], dtype=torch.int32, device="cuda")
    out = poisoned(1, 4, 300, dtype=torch.float32)
    tile = gemm.GemmTile(64, 32, 4, 2)
    gemm.linear(x, weight, out, tile, 16, index=index, count=count)
    expected = gemm.linear_twin(x[[17, 3, 5]], weight)
    assert relative_error(out[:, :3], expected) < tolerance(dtype)
    assert torch.isnan(out[:, 3]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up(dtype: torch.dtype) -> None:
    from ouro_kernels.triton_ops import gemm

    weight = (torch.randn(2 * 5632, 2048, device="cuda") / 45).to(dtype)
    x = torch.randn(40, 2048, device="cuda").to(dtype)
    narrow = dtype == torch.float32
    tile = gemm.GemmTile(64, 32 if narrow else 64, 4, 2)
    out = poisoned(40, 5632, dtype=dtype)
    gemm.gate_up(x, weight, out, tile, 32 if narrow else 64)
    assert relative_error(out, gemm.gate_up_twin(x, weight)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2048, 96])
def test_norms(dtype: torch.dtype, width: int) -> None:
    from ouro_kernels.triton_ops import norm

    partial = torch.randn(4, 9, width, device="cuda")
    residual, one, two = (torch.randn(n, width, device="cuda").to(dtype) for n in (9, 1, 1))
    expected = norm.sandwich_twin(partial, residual, one[0], two[0], 1e-6)
    x = poisoned(9, width, dtype=dtype)
    norm.sandwich(partial, residual, one[0], two[0], x, 1e-6)
    assert relative_error(residual, expected[0]) < tolerance(dtype)
    assert relative_error(x, expected[1]) < tolerance(dtype)
    out = poisoned(9, width, dtype=dtype)
    norm.rms(residual, one[0], out, 1e-6)
    assert relative_error(out, rms_norm(residual, one[0], 1e-6)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 40])
def test_rope_write(dtype: torch.dtype, rows: int) -> None:
    """Both launch shapes (by row count); rows past the count and foreign slots stay as they were."""
    from ouro_kernels.triton_ops import norm

    heads, kv_heads, head_dim, splits = 4, 2, 32, 2
    qkv = torch.randn(splits, rows, (heads + 2 * kv_heads) * head_dim, device="cuda")
    angle = torch.rand(100, head_dim // 2, device="cuda")
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    positions = torch.randint(0, 100, (rows,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(200, device="cuda")[:rows].int()
    keys, values = (poisoned(200, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    query = poisoned(rows, heads, head_dim, dtype=dtype)
    count = torch.tensor([rows - 1], dtype=torch.int32, device="cuda")
    norm.rope_write(qkv, query, keys, values, slots, positions, count, cos, sin)
    expected = norm.rope_write_twin(qkv, heads, kv_heads, positions.long(), cos, sin)
    written = slots[:-1].long()
    for got, wanted in zip((query[:-1], keys[written], values[written]), expected, strict=True):
        assert relative_error(got, wanted[:-1]) < tolerance(dtype)
    assert torch.isnan(query[-1]).all()
    assert int(torch.isnan(keys).any(-1).any(-1).sum()) == 200 - (rows - 1)


def lanes(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """(query, keys, values, table, table_index, lengths); slots outside the lanes hold NaN."""
    longest = max(lengths)
    slots = torch.randperm(len(lengths) * longest + 100, device="cuda")
    keys, values = (poisoned(len(slots), kv_heads, head_dim, dtype=dtype) for _ in range(2))
    table = torch.zeros(2 * len(lengths), longest + 7, dtype=torch.int32, device="cuda")
    taken = 0
    for lane, length in enumerate(lengths):
        mine = slots[taken : taken + length]
        taken += length
        table[2 * lane + 1, :length] = mine.int()
        keys[mine] = torch.randn(length, kv_heads, head_dim, device="cuda").to(dtype)
        values[mine] = torch.randn(length, kv_heads, head_dim, device="cuda").to(dtype)
    query = torch.randn(len(lengths), heads, head_dim, device="cuda").to(dtype)
    index = torch.arange(len(lengths), device="cuda", dtype=torch.int32) * 2 + 1
    return query, keys, values, table, index, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def group_of(length: int) -> int:
    return attention.SHORT_GROUP if length <= attention.SHORT_LENGTH else attention.LONG_GROUP


def make_work(lengths: list[int], heads: int, head_dim: int, *, fine: bool) -> WorkList:
    """The list that ``begin_round_kernel`` would make."""
    starts = [list(range(0, n, attention.TILE if fine else group_of(n))) for n in lengths]
    full = [(lane, at) for lane, mine in enumerate(starts) for at in mine[:-1]]
    items = full + [(lane, mine[-1]) for lane, mine in enumerate(starts)]
    work = WorkList(max(len(lengths), len(items)), max(lengths), heads, head_dim, torch.device("cuda"))
    work.table_index, work.length = work.table_index[: len(lengths)], work.length[: len(lengths)]
    work.length[:] = torch.tensor(lengths)
    work.table_index[:] = torch.arange(len(lengths))
    firsts = [sum(len(mine) - 1 for mine in starts[:lane]) for lane in range(len(lengths))]
    work.first_item[: len(lengths)] = torch.tensor(firsts)
    work.item_lane[: len(items)] = torch.tensor([lane for lane, _ in items])
    work.item_start[: len(items)] = torch.tensor([at for _, at in items])
    work.num_items[0], work.num_full[0], work.fine[0] = len(items), len(full), fine
    return work


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 128), (4, 2, 64), (4, 2, 16)])
def test_decode_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Right, and bit-identical alone and in company."""
    lengths = [1, 31, 128, 129, 1000, 2048, 2049, 5000]
    query, keys, values, table, index, length = lanes(lengths, heads, kv_heads, head_dim, dtype)
    scale = head_dim**-0.5

    def run(chosen: list[int], *, fine: bool) -> torch.Tensor:
        work = make_work([lengths[lane] for lane in chosen], heads, head_dim, fine=fine)
        work.table_index[:] = index[chosen]
        work.partial.fill_(torch.nan)
        count = torch.tensor([len(chosen)], dtype=torch.int32, device="cuda")
        out = poisoned(len(chosen), heads, head_dim, dtype=dtype)
        attention.decode_attention(query[chosen], keys, values, table, work, count, out, scale, 500)
        return out

    whole = run(list(range(len(lengths))), fine=False)
    expected = attention.decode_attention_twin(query, keys, values, table, index, length, scale)
    assert relative_error(whole, expected) < tolerance(dtype)
    for lane in range(len(lengths)):
        for fine in (False, True):
            assert torch.equal(run([lane], fine=fine)[0], whole[lane]), (lengths[lane], fine)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 128), (4, 2, 64)])
def test_prefill_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Right, and bit-identical for every chunk of a row and beside other rows."""
    from ouro_kernels.triton_ops.prefill import PrefillBlocks, prefill_attention

    block_q, block_k = (64, 32) if dtype == torch.float32 else (128, 64)
    lengths = [700, 301]
    _, keys, values, table, _, _ = lanes(lengths, heads, kv_heads, head_dim, dtype)
    scale = head_dim**-0.5
    queries = [torch.randn(n, heads, head_dim, device="cuda").to(dtype) for n in lengths]

    def run(segments: list[tuple[int, int, int]]) -> torch.Tensor:
        plan = PrefillBlocks([(2 * lane + 1, start, end) for lane, start, end in segments], block_q)
        blocks = torch.tensor(plan.columns, dtype=torch.int32, device="cuda")
        packed = torch.cat([queries[lane][start:end] for lane, start, end in segments])
        out = poisoned(*packed.shape, dtype=dtype)
        prefill_attention(packed, keys, values, table, blocks, 0, out, scale, block_q, block_k)
        return out

    whole = [run([(lane, 0, length)]) for lane, length in enumerate(lengths)]
    for lane, length in enumerate(lengths):
        slots = table[2 * lane + 1, :length].long()
        group = heads // kv_heads
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries[lane].float().transpose(0, 1)[None],
            keys[slots].float().repeat_interleave(group, 1).transpose(0, 1)[None],
            values[slots].float().repeat_interleave(group, 1).transpose(0, 1)[None],
            is_causal=True,
        )[0].transpose(0, 1)
        assert relative_error(whole[lane], expected) < tolerance(dtype)
    for segments in ([(1, 0, 301), (0, 0, 700)], [(0, 17, 130), (1, 100, 101)], [(0, 640, 700)], [(0, 1, 2)]):
        parts = run(segments).split([end - start for _, start, end in segments])
        for (lane, start, end), part in zip(segments, parts, strict=True):
            assert torch.equal(part, whole[lane][start:end]), segments
