"""Plans that steer the attention kernels, as plain Python: prefill groups and decode work lists."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ouro_kernels.triton_ops import attention
from ouro_kernels.triton_ops.attention import WorkList
from ouro_kernels.triton_ops.prefill import GATHER_TOKENS, most_blocks, most_copies, plan_groups

Segment = tuple[int, int, int]  # row, start, end


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[Segment], int, int, int]:
    """(segments of distinct rows, block_q, block_k, capacity)."""
    block_k = draw(st.sampled_from([8, 32, 64]))
    block_q = block_k * draw(st.integers(1, 3))
    rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True))
    segments = []
    for row in rows:
        start = draw(st.integers(0, 300))
        segments.append((row, start, start + draw(st.integers(1, 300))))
    longest = max(-(-end // block_k) * block_k for _, _, end in segments)
    return segments, block_q, block_k, longest + draw(st.integers(0, 1500))


@settings(deadline=None)
@given(chunks())
def test_prefill_groups_cover_a_chunk_exactly_once(
    chunk: tuple[list[Segment], int, int, int],
) -> None:
    segments, block_q, block_k, capacity = chunk
    groups = plan_groups(segments, block_q, block_k, capacity)
    positions = [(row, at) for row, start, end in segments for at in range(start, end)]
    assert [group.first for group in groups] == [0, *(group.end for group in groups[:-1])]
    assert groups[-1].end == len(positions)

    left = list(segments)
    for group in groups:
        mine: list[Segment] = []
        while sum(end - start for _, start, end in mine) < group.end - group.first:
            mine.append(left.pop(0))
        assert positions[group.first : group.end] == [
            (r, at) for r, low, end in mine for at in range(low, end)
        ]
        own = group.places
        assert len(own) == group.end - group.first

        # every position is a query of one block, which finds its row's keys at the right places
        queries: list[int] = []
        base_of_row: dict[int, int] = {}
        for block, first, last, packed, place in group.blocks:
            assert block % block_q == 0
            assert block <= first < last <= block + block_q
            for at in range(first, last):
                index = packed + at - block
                row, position = positions[group.first + index]
                assert position == at
                assert own[index] == place + at
                assert base_of_row.setdefault(row, place) == place
                queries.append(index)
        assert sorted(queries) == list(range(len(own)))
        assert len(group.blocks) <= most_blocks(len(own), len(mine), block_q)
        assert len(group.copies) <= most_copies(capacity, len(mine))
        ends = [block[2] for block in group.blocks]
        assert ends == sorted(ends, reverse=True)

        # each place from a row's position 0 to its padded end is written once, and no other
        written = list(own)
        expected: list[int] = []
        copied: dict[int, list[int]] = {}
        for row, low, high, place in group.copies:
            assert 0 < high - low <= GATHER_TOKENS
            written.extend(range(place + low, place + high))
            owner = next(r for r, base in base_of_row.items() if base == place)
            assert row in (owner, -1)
            if row == owner:
                copied.setdefault(row, []).extend(range(low, high))
        for row, start, end in mine:
            padded = -(-end // block_k) * block_k
            expected.extend(range(base_of_row[row], base_of_row[row] + padded))
            assert sorted(copied.get(row, [])) == list(range(start))
        assert sorted(written) == sorted(expected)
        assert len(set(expected)) == len(expected) <= capacity
        assert max(expected) < capacity
        if left:  # groups are not shorter than need be
            assert len(expected) + -(-left[0][2] // block_k) * block_k > capacity
    assert not left


def chosen_lengths() -> st.SearchStrategy[list[int]]:
    edges = [1, 63, 64, 65, 767, 768, 769, 2048, 2049, 2559, 2560, 2561]
    length = st.one_of(st.sampled_from(edges), st.integers(1, 5000))
    few = st.lists(length, min_size=1, max_size=12)
    return st.one_of(few, st.lists(st.integers(1500, 5000), min_size=20, max_size=40))


@settings(deadline=None)
@given(chosen_lengths(), st.integers(1, 70))
def test_a_work_list_cuts_every_lane_without_gap(lengths: list[int], ranges: int) -> None:
    """Ranges hold all parts in order and know the lanes that they begin in; they differ by a part at most,
    or are the groups. No group has more parts than places."""
    work = WorkList(40, 5000, 2, 16, ranges, torch.device("cpu"))
    work.fill(list(range(len(lengths))), lengths)
    num_parts = int(work.num_parts)
    *begins, end = work.range_begin.tolist()
    assert begins == sorted(begins)
    assert (begins[0], end) == (0, num_parts)
    group_begins: list[int] = []
    all_parts = 0
    for lane, length in enumerate(lengths):
        assert (int(work.first_part[lane]), int(work.first_group[lane])) == (all_parts, len(group_begins))
        parts = -(-length // attention.PART)
        for number, begin in enumerate(begins):
            if all_parts <= begin < all_parts + parts:
                assert int(work.range_lane[number]) == lane
        group = attention.SHORT_GROUP if length <= attention.SHORT_LENGTH else attention.LONG_GROUP
        groups = max((length + group // 2) // group, 1)
        assert -(-(length - (groups - 1) * group) // attention.PART) <= attention.PLACES
        group_begins += [all_parts + number * group // attention.PART for number in range(groups)]
        all_parts += parts
    assert all_parts == num_parts
    assert len(group_begins) * 2 <= len(work.group_arrived)
    widths = [b - a for a, b in pairwise([*begins, end])]
    if max(widths) - min(widths) > 1:
        assert begins == group_begins + [end] * (ranges - len(group_begins))
        assert max(widths) <= num_parts / ranges + 1.25  # not much more than a fair share


def test_numbers_of_parts_and_ranges_stay_within_32_bits() -> None:
    work = WorkList(2048, 131072, 1, 16, 2112, torch.device("cpu"))
    assert 1 <= work.ranges < 2112
    assert (2048 * 131072 // attention.PART + 1) * work.ranges < 2**31
    assert WorkList(128, 65536, 16, 16, 66, torch.device("cpu")).ranges == 66
