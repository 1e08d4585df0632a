"""Triton kernels against their plain-torch twins on random inputs, outputs poisoned beforehand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ouro_kernels.norm import rms_norm
from ouro_kernels.triton_ops import attention, prefill
from ouro_kernels.triton_ops.attention import WorkList

pytestmark = pytest.mark.gpu

SIXTEEN_BITS = [pytest.param(torch.float16, id="float16"), pytest.param(torch.bfloat16, id="bfloat16")]
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|; NaN when anything is unwritten."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


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
        tile = gemm.GemmTile(
            block, 64, 32 if narrow else min(128, inner // splits), 4, 2, swap and not narrow
        )
        out = poisoned(splits, rows, columns, dtype=torch.float32)
        gemm.linear(x[:rows], weight, out, tile, splits)
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
    tile = gemm.GemmTile(16, 64, 32, 4, 2)
    gemm.linear(x, weight, out, tile, index=index, count=count)
    expected = gemm.linear_twin(x[[17, 3, 5]], weight)
    assert relative_error(out[:, :3], expected) < tolerance(dtype)
    assert torch.isnan(out[:, 3]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up(dtype: torch.dtype) -> None:
    from ouro_kernels.triton_ops import gemm

    weight = (torch.randn(2 * 5632, 2048, device="cuda") / 45).to(dtype)
    x = torch.randn(40, 2048, device="cuda").to(dtype)
    narrow = dtype == torch.float32
    tile = gemm.GemmTile(32 if narrow else 64, 64, 32 if narrow else 64, 4, 2)
    out = poisoned(40, 5632, dtype=dtype)
    gemm.gate_up(x, weight, out, tile)
    assert relative_error(out, gemm.gate_up_twin(x, weight)) < tolerance(dtype)


@pytest.mark.parametrize(
    ("columns", "inner", "splits", "block_k"),
    [(6144, 2048, 1, 128), (2048, 2048, 4, 128), (2048, 5632, 2, 128), (259, 96, 1, 32), (64, 16, 1, 16)],
)
def test_linear_ahead_has_the_bits_of_linear(columns: int, inner: int, splits: int, block_k: int) -> None:
    from ouro_kernels.triton_ops import gemm, hopper

    if not hopper.supported(torch.device("cuda"), torch.bfloat16):
        pytest.skip("these kernels need compute capability 9")
    weight = (torch.randn(columns, inner, device="cuda") / inner**0.5).bfloat16()
    for rows, block_m in ((1, 16), (7, 16), (16, 16), (33, 32), (100, 128), (130, 64)):
        x = torch.randn(rows, inner, device="cuda").bfloat16()
        tile = gemm.GemmTile(block_m, 64, block_k, 4, 4, swap=True)
        out, expected = (poisoned(splits, rows, columns, dtype=torch.float32) for _ in range(2))
        gemm.linear(x, weight, expected, tile, splits)
        hopper.products.linear(x, weight, out, tile, splits)
        assert torch.equal(out, expected), rows


@pytest.mark.parametrize(("width", "inner", "block_k"), [(5632, 2048, 128), (96, 64, 64), (40, 48, 16)])
def test_gate_up_ahead_has_the_bits_of_gate_up(width: int, inner: int, block_k: int) -> None:
    from ouro_kernels.triton_ops import gemm, hopper

    if not hopper.supported(torch.device("cuda"), torch.bfloat16):
        pytest.skip("these kernels need compute capability 9")
    weight = (torch.randn(2 * width, inner, device="cuda") / inner**0.5).bfloat16()
    for rows, block_m in ((1, 16), (16, 16), (33, 32), (100, 64), (130, 128)):
        x = torch.randn(rows, inner, device="cuda").bfloat16()
        tile = gemm.GemmTile(block_m, 64, block_k, 4, 3, swap=True)
        out, expected = (poisoned(rows, width, dtype=torch.bfloat16) for _ in range(2))
        gemm.gate_up(x, weight, expected, tile)
        hopper.products.gate_up(x, weight, out, tile)
        assert torch.equal(out, expected), rows


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
def test_rope_write(dtype: torch.dtype) -> None:
    """Right, to slots and side by side; foreign slots and places stay as they were."""
    rows, heads, kv_heads, head_dim = 40, 4, 2, 32
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    angle = torch.rand(100, head_dim // 2, device="cuda")
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    positions = torch.randint(0, 100, (rows,), device="cuda", dtype=torch.int32)
    slots, places = (torch.randperm(200, device="cuda")[:rows].int() for _ in range(2))
    keys, values = (poisoned(200, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    packed_keys, packed_values = (poisoned(200, kv_heads * head_dim, dtype=dtype) for _ in range(2))
    query = poisoned(rows, heads, head_dim, dtype=dtype)
    prefill.rope_write(
        qkv, query, keys, values, slots, positions, places, packed_keys, packed_values, cos, sin
    )
    expected = prefill.rope_twin(qkv, heads, kv_heads, positions.long(), cos, sin)
    for got, wanted in zip((query, keys[slots.long()], values[slots.long()]), expected, strict=True):
        assert relative_error(got, wanted) < tolerance(dtype)
    for packed, whole in ((packed_keys, keys), (packed_values, values)):
        assert torch.equal(packed[places.long()].view(rows, kv_heads, -1), whole[slots.long()])
        assert int(torch.isnan(packed).any(-1).sum()) == 200 - rows
        assert int(torch.isnan(whole).any(-1).any(-1).sum()) == 200 - rows


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(("width", "inner"), [(5632, 2048), (136, 64)])
def test_gate_up_of_a_chunk(dtype: torch.dtype, width: int, inner: int) -> None:
    """Right, and a row's bits are the same among any other rows, whoever computes which tile."""
    from ouro_kernels.triton_ops import gemm, hopper

    if not hopper.supported(torch.device("cuda"), dtype):
        pytest.skip("these kernels need compute capability 9")
    weight = (torch.randn(2 * width, inner, device="cuda") / inner**0.5).to(dtype)
    x = torch.randn(4000, inner, device="cuda").to(dtype)
    whole = hopper.chunk.gate_up(x, weight, 132)
    assert relative_error(whole, gemm.gate_up_twin(x, weight)) < tolerance(dtype)
    for start, end, programs in ((0, 1, 132), (5, 68, 3), (1000, 1130, 7), (0, 2000, 50)):
        assert torch.equal(hopper.chunk.gate_up(x[start:end], weight, programs), whole[start:end]), start


def lanes(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """(qkv, keys, values, table, table_index, lengths); slots outside the lanes hold NaN, and so do
    those of the last positions, which attention writes."""
    longest = max(lengths)
    slots = torch.randperm(len(lengths) * longest + 100, device="cuda")
    keys, values = (poisoned(len(slots), kv_heads, head_dim, dtype=dtype) for _ in range(2))
    table = torch.zeros(2 * len(lengths), longest + 7, dtype=torch.int32, device="cuda")
    taken = 0
    for lane, length in enumerate(lengths):
        mine = slots[taken : taken + length]
        taken += length
        table[2 * lane + 1, :length] = mine.int()
        keys[mine[:-1]] = torch.randn(length - 1, kv_heads, head_dim, device="cuda").to(dtype)
        values[mine[:-1]] = torch.randn(length - 1, kv_heads, head_dim, device="cuda").to(dtype)
    qkv = torch.randn(len(lengths), (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    index = torch.arange(len(lengths), device="cuda", dtype=torch.int32) * 2 + 1
    return qkv, keys, values, table, index, torch.tensor(lengths, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 128), (4, 2, 64), (4, 2, 16)])
def test_decode_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Right, and bit-identical alone and in company, with many ranges and few."""
    lengths = [1, 31, 128, 129, 1000, 4096, 4097, 9000, 40000]
    qkv, keys, values, table, index, length = lanes(lengths, heads, kv_heads, head_dim, dtype)
    angle = torch.rand(40000, head_dim // 2, device="cuda")
    angles = angle.cos().to(dtype), angle.sin().to(dtype)
    scale = head_dim**-0.5

    def run(chosen: list[int], ranges: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, keys, values); outputs of lanes that do not run hold NaN."""
        work = WorkList(2 * len(lengths), max(lengths), heads, head_dim, ranges, qkv.device)
        work.fill(index[chosen].tolist(), [lengths[lane] for lane in chosen])
        work.partial.fill_(torch.nan)
        own_keys, own_values = keys.clone(), values.clone()
        out = poisoned(2 * len(lengths), heads, head_dim, dtype=dtype)
        attention.decode_attention(qkv[chosen], own_keys, own_values, table, *angles, work, out, scale)
        assert not work.group_arrived.any()
        assert not work.lane_arrived.any()
        return out, own_keys, own_values

    everyone = list(range(len(lengths)))
    whole, new_keys, new_values = run(everyone, 66)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    expected = attention.decode_attention_twin(
        qkv, wanted_keys, wanted_values, table, *angles, index, length, scale
    )
    assert relative_error(whole[: len(lengths)], expected) < tolerance(dtype)
    torch.testing.assert_close(new_keys, wanted_keys, equal_nan=True)
    assert torch.equal(new_values.nan_to_num(7), wanted_values.nan_to_num(7))
    for ranges in (7, 2000):
        assert torch.equal(run(everyone, ranges)[0][: len(lengths)], whole[: len(lengths)]), ranges
    twice = run(everyone * 2, 66)[0]
    assert torch.equal(twice, whole[: len(lengths)].repeat(2, 1, 1))
    for lane in everyone:
        out, _, _ = run([lane], 66)
        assert torch.equal(out[0], whole[lane]), lengths[lane]
        assert torch.isnan(out[1:]).all()


@pytest.mark.parametrize("kernel", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", [*DTYPES, pytest.param(torch.float16, id="float16")])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 128), (4, 2, 64)])
@pytest.mark.parametrize("capacity", [768, 4096])
def test_prefill_attention(
    kernel: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, capacity: int
) -> None:
    """Right, and bit-identical for every chunk of a row and beside other rows, in one group or several."""
    from ouro_kernels.triton_ops import hopper

    describe = prefill.TensorDescriptor.from_tensor
    block_q, block_k = (32, 32) if dtype == torch.float32 else (64, 64)
    attend = partial(prefill.prefill_attention, block_q=block_q)
    if kernel == "hopper":
        if not hopper.supported(torch.device("cuda"), dtype):
            pytest.skip("these kernels need 16 bits and compute capability 9")
        describe = hopper.products.describe
        block_q, block_k = hopper.prefill.BLOCK_Q, hopper.prefill.BLOCK_K
        attend = partial(hopper.prefill.prefill_attention, programs=7)
    lengths = [700, 301]
    _, keys, values, table, _, _ = lanes([length + 1 for length in lengths], heads, kv_heads, head_dim, dtype)
    scale = head_dim**-0.5
    queries = [torch.randn(n, heads, head_dim, device="cuda").to(dtype) for n in lengths]
    packed = prefill.PackedKV(capacity, kv_heads, head_dim, block_k, dtype, keys.device, describe)

    def ints(values: list[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def run(segments: list[tuple[int, int, int]]) -> torch.Tensor:
        query = torch.cat([queries[lane][start:end] for lane, start, end in segments])
        out = poisoned(*query.shape, dtype=dtype)
        slots = torch.cat([table[2 * lane + 1, start:end] for lane, start, end in segments]).long()
        packed.keys.fill_(torch.nan)
        packed.values.fill_(torch.nan)
        plan = [(2 * lane + 1, start, end) for lane, start, end in segments]
        for group in prefill.plan_groups(plan, block_q, block_k, capacity):
            mine = slice(group.first, group.end)
            packed.keys[group.places] = keys[slots[mine]].view(-1, kv_heads * head_dim)
            packed.values[group.places] = values[slots[mine]].view(-1, kv_heads * head_dim)
            # places behind those that count are never read
            copies, blocks = ints([*group.copies, (9**9,) * 4]), ints([*group.blocks, (9**9,) * 5])
            num_copies, num_blocks = ints([len(group.copies)]), ints([len(group.blocks)])
            prefill.gather(keys, values, table, copies, num_copies, 0, packed.keys, packed.values)
            tiles = packed.key_tiles, packed.value_tiles
            attend(query[mine], *tiles, blocks, num_blocks, out[mine], scale, kv_heads)
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
