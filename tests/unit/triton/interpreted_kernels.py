"""Attention, products and norms by the Triton kernels under Triton's interpreter, against their twins.

A pytest file, run in a child process by test_interpreted.py; by hand: TRITON_INTERPRET=1.
The interpreter runs one program after the other and computes with numpy, so races and the compiler's
freedom do not show here; indices, masks, work lists and merge orders do. The sizes that cut a lane are
shrunk, since every operation costs microseconds.

Bits: a row, lane or position must have equal bits in any company, because its chain of operations has
the same shapes. Tiles of different shapes are compared on small integers instead, whose sums are exact
in any order: numpy's matmul may choose another order for another shape.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass

import pytest
import torch
from ouro_kernels.norm import rms_norm
from ouro_kernels.triton_ops import attention, gemm, norm, prefill, state
from ouro_kernels.triton_ops.attention import WorkList
from torch import Tensor

# numpy warns of infinities and NaN that a mask throws away
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.timeout(600)]

CPU = torch.device("cpu")
MARGIN = 1 << 14  # elements


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


class Guarded:
    """A poisoned tensor amid memory that nobody may write; ``check`` fails if somebody has."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        count = torch.Size(shape).numel()
        self._whole = torch.full((count + 2 * MARGIN,), 7.0, dtype=dtype)
        self.inner = self._whole[MARGIN : MARGIN + count].view(shape).fill_(torch.nan)

    def check(self) -> None:
        assert (self._whole[:MARGIN] == 7.0).all()
        assert (self._whole[-MARGIN:] == 7.0).all()


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit; NaN, which means unwritten, only where it is expected."""
    return torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num())


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def angles(positions: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.rand(positions, head_dim // 2) * 0.3
    return angle.cos().to(dtype), angle.sin().to(dtype)


# ----------------------------------------------------------------------- decode attention


@dataclass
class Lanes:
    """Random lanes. Slots outside of them hold NaN, and so do those of the new positions; the table
    points there too wherever it is not meant to be read."""

    lengths: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        count, longest = len(self.lengths), max(self.lengths)
        slots = torch.randperm(sum(self.lengths) + 50)
        self.keys, self.values = (
            poisoned(len(slots), self.kv_heads, self.head_dim, dtype=self.dtype) for _ in range(2)
        )
        self.table = torch.full((2 * count, longest + 3), int(slots[-1]), dtype=torch.int32)
        self.index = torch.randperm(2 * count)[:count].tolist()
        self.new_slots = []
        taken = 0
        for row, length in zip(self.index, self.lengths, strict=True):
            mine = slots[taken : taken + length]
            taken += length
            self.table[row, :length] = mine.int()
            self.new_slots.append(int(mine[-1]))
            for whole in (self.keys, self.values):
                whole[mine[:-1]] = torch.randn(length - 1, self.kv_heads, self.head_dim).to(self.dtype)
        self.qkv = torch.randn(count, (self.heads + 2 * self.kv_heads) * self.head_dim).to(self.dtype)
        self.angles = angles(longest, self.head_dim, self.dtype)
        self.scale = self.head_dim**-0.5

    def run(self, chosen: list[int], ranges: int) -> tuple[Tensor, Tensor, Tensor]:
        """(output of the chosen lanes [n, heads, D], keys, values after it)."""
        count, lengths = len(self.lengths), [self.lengths[lane] for lane in chosen]
        work = WorkList(count, max(self.lengths), self.heads, self.head_dim, ranges, CPU)
        # wrong places show as NaN, wrong ranges as lanes without a length
        for unread in (
            work.range_begin,
            work.range_lane,
            work.length,
            work.first_part,
            work.first_group,
            work.table_index,
        ):
            unread.fill_(10**6)
        work.fill([self.index[lane] for lane in chosen], lengths)
        for partial in (work.partial, work.peak, work.total):
            partial.fill_(torch.nan)
        keys, values = self.keys.clone(), self.values.clone()
        out = poisoned(count, self.heads, self.head_dim, dtype=self.dtype)
        attention.decode_attention(
            self.qkv[chosen], keys, values, self.table, *self.angles, work, out, self.scale
        )
        assert not work.group_arrived.any()
        assert not work.lane_arrived.any()
        assert out[len(chosen) :].isnan().all()
        return out[: len(chosen)], keys, values

    def twin(self) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.keys.clone(), self.values.clone()
        out = attention.decode_attention_twin(
            self.qkv,
            keys,
            values,
            self.table,
            *self.angles,
            ints(self.index),
            ints(self.lengths),
            self.scale,
        )
        return out, keys, values


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes a quarter of the real ones or less."""
    sizes = {"PART": 16, "SHORT_LENGTH": 64, "SHORT_GROUP": 32, "LONG_GROUP": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(attention, name, value)
        monkeypatch.setitem(attention.SIZES, name, value)
    monkeypatch.setattr(attention, "TILE", 8)
    monkeypatch.setattr(attention, "UNROLL", 3)
    monkeypatch.setattr(attention, "PLACES", 6)


# ends of tiles, parts and groups; a last group of half a group to half as many again; long groups
SMALL_LENGTHS = [1, 15, 16, 17, 47, 48, 49, 64, 65, 95, 96, 97, 161]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(4, 2, torch.float32), (2, 2, torch.float16)])
def test_decode_attention(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Right; equal bits wherever ranges are cut, in any order and company."""
    case = Lanes(SMALL_LENGTHS, heads, kv_heads, 16, dtype)
    # head 0 scores all keys far below zero, so that what masks and unused places add would show
    case.keys.abs_()
    case.qkv[:, :16].abs_().neg_()
    everyone = list(range(len(case.lengths)))
    whole, keys, values = case.run(everyone, ranges=1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    expected, wanted_keys, wanted_values = case.twin()
    assert_close(whole, expected, tolerance)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[case.new_slots] = False
    assert same(keys[untouched], case.keys[untouched])
    assert same(values, wanted_values)
    assert_close(keys[case.new_slots], wanted_keys[case.new_slots], tolerance)

    parts = sum(-(-length // 16) for length in case.lengths)
    for ranges in (2, 3, 5, 7, 9, 12, 17, parts // 2, parts - 1, parts):
        order = everyone if ranges % 2 else everyone[::-1]
        assert same(case.run(order, ranges)[0], whole[order]), ranges
    assert same(case.run(everyone[4:8], 2)[0], whole[4:8])
    for lane, length in enumerate(case.lengths):  # alone: a part each, and programs that have none
        out, own_keys, own_values = case.run([lane], ranges=13)
        assert same(out[0], whole[lane]), length
        slot = case.new_slots[lane]
        assert same(own_keys[slot], keys[slot])
        assert same(own_values[slot], values[slot])
        foreign = torch.arange(len(keys)) != slot
        assert same(own_keys[foreign], case.keys[foreign])
        assert same(own_values[foreign], case.values[foreign])


def test_decode_attention_at_its_real_sizes() -> None:
    case = Lanes([1, 63, 64, 65, 767, 768, 1100, 2048, 2049, 3000], 1, 1, 16)
    everyone = list(range(10))
    whole, keys, values = case.run(everyone, ranges=6)  # some groups in two, some whole
    expected, wanted_keys, wanted_values = case.twin()
    assert_close(whole, expected, 1e-5)
    assert_close(keys[case.new_slots], wanted_keys[case.new_slots], 1e-6)
    assert same(values, wanted_values)
    assert same(case.run(everyone, ranges=23)[0], whole)
    for lane, length in enumerate(case.lengths):
        assert same(case.run([lane], ranges=9)[0][0], whole[lane]), length


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ranges", [1, 5, 17, 200])
def test_begin_round_writes_the_work_list_of_the_rows_that_run(ranges: int) -> None:
    pick = random.Random(ranges)
    loops, rows, max_length = 4, 11, 300
    table = torch.randint(0, 10**6, (loops, rows, max_length), dtype=torch.int32)
    for trial in range(8):
        states = [pick.choice([0, 1, 2, 2, 2, 3, 4, 4, 5]) for _ in range(rows)]
        if trial == 0:
            states = [3] * rows  # nothing runs
        positions = [pick.choice([0, 15, 16, 47, 63, 64, 95, pick.randrange(280)]) for _ in range(rows)]
        depths = [pick.randrange(loops) for _ in range(rows)]
        granted = [position + pick.choice([0, 1, 1, 20]) for position in positions]
        runs = [row for row in range(rows) if states[row] in (2, 4) and positions[row] < granted[row]]
        expected, work = (WorkList(rows, max_length, 2, 16, ranges, CPU) for _ in range(2))
        indices = [depths[row] * rows + row for row in runs]
        expected.fill(indices, [positions[row] + 1 for row in runs])

        lanes, slots, count = (torch.full((size,), -9, dtype=torch.int32) for size in (rows, rows, 1))
        names = ("table_index", "length", "first_part", "first_group", "range_begin", "range_lane")
        written = [getattr(work, name) for name in names]
        for column in written:
            column.fill_(-9)
        state_column = torch.tensor(states)
        state.begin_round_kernel[(1,)](
            state_column,
            *(torch.tensor(column) for column in (positions, depths, granted)),
            table,
            lanes,
            slots,
            count,
            *written,
            work.num_parts,
            rows,
            max_length,
            ranges,
            BR=16,
            BRANGES=256,
            **attention.SIZES,
        )
        number = len(runs)
        begins = expected.range_begin.tolist()
        used = bisect_left(begins, begins[-1])  # ranges with parts, or before one that has some
        assert (int(count), int(work.num_parts)) == (number, int(expected.num_parts))
        for name in names:
            size = {"range_begin": ranges + 1, "range_lane": used}.get(name, number)
            got = getattr(work, name)
            assert torch.equal(got[:size], getattr(expected, name)[:size]), name
            assert (got[size:] == -9).all(), name
        assert lanes.tolist() == runs + [-9] * (rows - number)
        assert slots[:number].tolist() == [int(table[depths[row], row, positions[row]]) for row in runs]
        assert (slots[number:] == -9).all()
        live = [2 if row in runs else 4 if states[row] in (2, 4) else states[row] for row in range(rows)]
        assert state_column.tolist() == live


# ---------------------------------------------------------------------- prefill attention

BLOCK_Q, BLOCK_K = 16, 8
LENGTHS = [52, 21, 35]
SHARED = 19  # the last row begins as the first does
ROWS, DEPTH = 4, 1  # the table has rows and depths that no segment is of

Chunk = list[tuple[int, int, int]]


@dataclass
class Prompts:
    """qkv [length, (heads + 2 kv_heads) * D] of three rows, and slots of their own."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = [torch.randn(length, width).to(self.dtype) for length in LENGTHS]
        self.qkv[2][:SHARED] = self.qkv[0][:SHARED]
        self.slots = sum(LENGTHS) + 20
        free = torch.randperm(self.slots).int()
        self.table = torch.full((2 * ROWS, 60), int(free[-1]), dtype=torch.int32)
        for row, mine in enumerate(free.split([*LENGTHS, 20])[:-1]):
            self.table[DEPTH * ROWS + row, : len(mine)] = mine
        self.angles = angles(60, self.head_dim, self.dtype)

    def run(self, chunks: list[Chunk], capacity: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """(output of every row [length, heads, D], keys, values), chunk by chunk as they come."""
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        keys, values = (poisoned(self.slots, kv_heads, head_dim, dtype=self.dtype) for _ in range(2))
        packed = prefill.PackedKV(capacity, kv_heads, head_dim, BLOCK_K, self.dtype, CPU)
        found = [poisoned(length, heads, head_dim, dtype=self.dtype) for length in LENGTHS]
        for chunk in chunks:
            qkv = torch.cat([self.qkv[row][start:end] for row, start, end in chunk])
            positions = torch.cat([torch.arange(start, end) for _, start, end in chunk])
            slots = torch.cat([self.table[DEPTH * ROWS + row, start:end] for row, start, end in chunk])
            query, out = (Guarded(len(qkv), heads, head_dim, dtype=self.dtype) for _ in range(2))
            for group in prefill.plan_groups(chunk, BLOCK_Q, BLOCK_K, capacity):
                packed.keys.fill_(torch.nan)
                packed.values.fill_(torch.nan)
                mine = slice(group.first, group.end)
                prefill.rope_write(
                    qkv[mine],
                    query.inner[mine],
                    keys,
                    values,
                    slots[mine],
                    positions[mine],
                    ints(group.places),
                    packed.keys,
                    packed.values,
                    *self.angles,
                )
                # places behind those that count are never read
                copies = ints([*group.copies, (9**9,) * 4])
                count = ints([len(group.copies)])
                prefill.gather(
                    keys, values, self.table, copies, count, DEPTH * ROWS, packed.keys, packed.values
                )
                prefill.prefill_attention(
                    query.inner[mine],
                    packed.key_tiles,
                    packed.value_tiles,
                    ints([*group.blocks, (9**9,) * 5]),
                    ints([len(group.blocks)]),
                    out.inner[mine],
                    head_dim**-0.5,
                    kv_heads,
                    BLOCK_Q,
                )
            query.check()
            out.check()
            parts = out.inner.split([end - start for _, start, end in chunk])
            for (row, start, end), part in zip(chunk, parts, strict=True):
                found[row][start:end] = part
        return found, keys, values

    def twin(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """(output, keys, values) of all positions of a row."""
        positions = torch.arange(LENGTHS[row])
        query, key, value = prefill.rope_twin(
            self.qkv[row], self.heads, self.kv_heads, positions, *self.angles
        )
        share = self.heads // self.kv_heads
        out = torch.nn.functional.scaled_dot_product_attention(
            query.float().transpose(0, 1),
            key.float().repeat_interleave(share, 1).transpose(0, 1),
            value.float().repeat_interleave(share, 1).transpose(0, 1),
            is_causal=True,
        )
        return out.transpose(0, 1), key, value


def random_chunks(seed: int) -> list[Chunk]:
    """All rows in pieces of random size, several rows in most chunks."""
    pick = random.Random(seed)
    done = [0] * len(LENGTHS)
    found: list[Chunk] = []
    while done != LENGTHS:
        left = [row for row, length in enumerate(LENGTHS) if done[row] < length]
        chunk = []
        for row in pick.sample(left, pick.randint(1, len(left))):
            end = min(LENGTHS[row], done[row] + pick.choice([1, 7, 16, 25, 40]))
            chunk.append((row, done[row], end))
            done[row] = end
        found.append(chunk)
    return found


@pytest.fixture
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "GATHER_TOKENS", 8)
    monkeypatch.setattr(prefill, "GATHER_COLUMNS", 32)


@pytest.mark.usefixtures("_small_copies")
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(4, 2, torch.float32), (3, 3, torch.float16)])
def test_prefill_attention(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Right, and equal bits whatever the chunks, with one group or several, over a shared prefix."""
    case = Prompts(heads, kv_heads, 16, dtype)
    whole, keys, values = case.run([[(row, 0, end)] for row, end in enumerate(LENGTHS)], 56)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for row, length in enumerate(LENGTHS):
        expected, key, value = case.twin(row)
        assert_close(whole[row], expected, tolerance)
        slots = case.table[DEPTH * ROWS + row, :length].long()
        assert_close(keys[slots], key, tolerance)
        assert same(values[slots], value)
    assert int(keys.isnan().all(-1).all(-1).sum()) == case.slots - sum(LENGTHS)

    everything = [(2, 0, 35), (0, 0, 52), (1, 0, 21)]
    for chunks, capacity in (
        ([everything], 120),  # one group
        ([everything], 80),  # two
        (random_chunks(1), 56),  # about one row per group
        (random_chunks(2), 96),
    ):
        found, own_keys, own_values = case.run(chunks, capacity)
        for got, expected in zip([*found, own_keys, own_values], [*whole, keys, values], strict=True):
            assert same(got, expected), (chunks, capacity)

    case.table[DEPTH * ROWS + 2, :SHARED] = case.table[DEPTH * ROWS, :SHARED]
    # the row with fewer keys lies before the other and is computed after it
    beside = [(1, 0, 5), (0, 30, 31)]
    found, _, _ = case.run([[(0, 0, 30)], beside, [(2, SHARED, 34)], [(2, 34, 35)]], 128)
    assert same(found[1][:5], whole[1][:5])
    assert same(found[0][:31], whole[0][:31])
    assert same(found[2][SHARED:], whole[2][SHARED:])
    assert found[2][:SHARED].isnan().all()


def test_rope_write_with_more_heads_than_a_block() -> None:
    rows, heads, kv_heads, head_dim, room = 5, 12, 3, 8, 20
    width = (heads + 2 * kv_heads) * head_dim
    qkv, table = torch.randn(rows, width), angles(50, head_dim, torch.float32)
    positions, slots, places = (torch.randperm(room)[:rows] for _ in range(3))
    query = Guarded(rows, heads, head_dim)
    whole = [Guarded(room, kv_heads, head_dim) for _ in range(2)]
    packed = [Guarded(room, kv_heads * head_dim) for _ in range(2)]
    prefill.rope_write(
        qkv,
        query.inner,
        *(tensor.inner for tensor in whole),
        slots,
        positions,
        places.int(),
        *(tensor.inner for tensor in packed),
        *table,
    )
    expected = prefill.rope_twin(qkv, heads, kv_heads, positions, *table)
    assert_close(query.inner, expected[0], 1e-6)
    for slotted, placed, wanted in zip(whole, packed, expected[1:], strict=True):
        assert_close(slotted.inner[slots], wanted, 1e-6)
        assert same(placed.inner[places].view(rows, kv_heads, -1), slotted.inner[slots])
        for tensor in (slotted, placed):
            assert int(tensor.inner.flatten(1).isnan().all(1).sum()) == room - rows
    for tensor in (query, *whole, *packed):
        tensor.check()


# ------------------------------------------------------------------------------- products


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


TILES = [
    gemm.GemmTile(16, 32, 32, 4, 2),
    gemm.GemmTile(16, 32, 16, 4, 2, swap=True),
    gemm.GemmTile(32, 64, 16, 4, 2, swap=True),
    gemm.GemmTile(64, 16, 32, 4, 3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("splits", [1, 3])
def test_linear(tile: gemm.GemmTile, splits: int, dtype: torch.dtype) -> None:
    """Exact on integers for every tile, rows and columns not its multiples."""
    weight, x = integers(70, 96, dtype=dtype), integers(37, 96, dtype=dtype)
    for rows in (1, 16, 17, 37):
        out = Guarded(splits, rows, 70)
        gemm.linear(x[:rows], weight, out.inner, tile, splits)
        assert torch.equal(out.inner, gemm.linear_twin(x[:rows], weight, splits))
        out.check()


@pytest.mark.parametrize("tile", TILES[:2])
def test_linear_gives_a_row_the_same_bits_at_every_row_count(tile: gemm.GemmTile) -> None:
    weight, x = torch.randn(40, 96), torch.randn(37, 96)
    whole = poisoned(3, 37, 40)
    gemm.linear(x, weight, whole, tile, 3)
    assert_close(whole, gemm.linear_twin(x, weight, 3), 1e-5)
    for rows in (1, 16, 17):
        out = poisoned(3, rows, 40)
        gemm.linear(x[:rows], weight, out, tile, 3)
        assert same(out, whole[:, :rows])


@pytest.mark.parametrize("tile", TILES)
def test_linear_of_gathered_rows(tile: gemm.GemmTile) -> None:
    """Rows at or past the count are not written, whether their tile runs or not."""
    weight, x = integers(70, 96), integers(23, 96)
    index = torch.randint(0, 23, (37,), dtype=torch.int32)
    expected = gemm.linear_twin(x[index.long()], weight, 3)
    for count in (0, 1, 15, 16, 17, 37):
        out = Guarded(3, 37, 70)
        gemm.linear(x, weight, out.inner, tile, 3, index=index, count=ints([count]))
        assert torch.equal(out.inner[:, :count], expected[:, :count])
        assert out.inner[:, count:].isnan().all()
        out.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tile", TILES)
def test_gate_up(tile: gemm.GemmTile, dtype: torch.dtype) -> None:
    """The last column tile reads rows of the other half, and past the weight: they must not show."""
    weight, x = integers(2 * 40, 64, dtype=dtype) / 8, integers(37, 64, dtype=dtype)
    whole = Guarded(37, 40, dtype=dtype)
    gemm.gate_up(x, weight, whole.inner, tile)
    assert_close(whole.inner, gemm.gate_up_twin(x, weight), 1e-5 if dtype == torch.float32 else 4e-3)
    whole.check()
    for rows in (1, 16, 17):
        out = Guarded(rows, 40, dtype=dtype)
        gemm.gate_up(x[:rows], weight, out.inner, tile)
        assert same(out.inner, whole.inner[:rows])
        out.check()


# ---------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [96, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_norms(dtype: torch.dtype, width: int, splits: int) -> None:
    """Right at widths that are no power of two, and the same for a row alone."""
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    partial = torch.randn(splits, 5, width)
    start, one, two = (torch.randn(n, width).to(dtype) for n in (5, 1, 1))

    def sandwich(rows: slice) -> tuple[Tensor, Tensor]:
        mine = start[rows].contiguous()
        residual, x = Guarded(*mine.shape, dtype=dtype), Guarded(*mine.shape, dtype=dtype)
        residual.inner.copy_(mine)
        norm.sandwich(partial[:, rows].contiguous(), residual.inner, one[0], two[0], x.inner, 1e-6)
        residual.check()
        x.check()
        return residual.inner, x.inner

    residual, x = sandwich(slice(0, 5))
    for got, expected in zip((residual, x), norm.sandwich_twin(partial, start, one, two, 1e-6), strict=True):
        assert_close(got, expected, tolerance)
    for got, expected in zip(sandwich(slice(3, 4)), (residual, x), strict=True):
        assert same(got, expected[3:4])

    out = Guarded(5, width, dtype=dtype)
    norm.rms(start, one[0], out.inner, 1e-6)
    assert_close(out.inner, rms_norm(start, one[0], 1e-6), tolerance)
    out.check()

    lanes, count = ints([4, 0, 2, 77, 77]), ints([3])
    kept, entered = Guarded(5, width, dtype=dtype), Guarded(5, width, dtype=dtype)
    norm.enter(start, lanes, count, one[0], kept.inner, entered.inner, 1e-6)
    assert same(kept.inner[:3], start[[4, 0, 2]])
    assert same(entered.inner[:3], out.inner[[4, 0, 2]])
    for tensor in (kept, entered):
        assert tensor.inner[3:].isnan().all()
        tensor.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [40, 2500])
def test_silu_and_multiply(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(3, 2 * width).to(dtype)
    gate, up = x.chunk(2, 1)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    whole = norm.silu_and_multiply(x)
    assert_close(whole, torch.nn.functional.silu(gate) * up, tolerance)
    assert same(norm.silu_and_multiply(x[1:2]), whole[1:2])
