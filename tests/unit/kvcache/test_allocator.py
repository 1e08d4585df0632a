from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_sgl.errors import IntegrityError
from ouro_sgl.kvcache.allocator import BLOCK, SlotAllocator


def test_takes_and_gives() -> None:
    slots = SlotAllocator(4)
    assert slots.take(3) == [0, 1, 2]
    assert len(slots) == 1
    slots.give([1])
    assert slots.take(2) == [1, 3]
    assert slots.take(0) == []
    assert slots.free_slots() == []


def test_refuses_to_overdraw_and_changes_nothing() -> None:
    slots = SlotAllocator(2)
    with pytest.raises(IntegrityError, match="3 slots wanted, 2"):
        slots.take(3)
    assert sorted(slots.take(2)) == [0, 1]


@given(st.integers(1, 5 * BLOCK), st.data())
def test_every_slot_is_free_or_taken_once(num_slots: int, data: st.DataObject) -> None:
    slots = SlotAllocator(num_slots)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            back = held.pop(data.draw(st.integers(0, len(held) - 1)))
            kept = data.draw(st.integers(0, len(back)))
            order = data.draw(st.sampled_from((1, -1)))
            slots.give(iter(back[kept:][::order]))
            if kept:
                held.append(back[:kept])
        else:
            held.append(slots.take(data.draw(st.integers(0, len(slots)))))
        free = slots.free_slots()
        assert len(free) == len(slots)
        assert sorted([*free, *(slot for some in held for slot in some)]) == list(range(num_slots))


def test_neighbours_stay_together_however_requests_come_and_go() -> None:
    """Prompts, and outputs that keep two of four slots, for many times the size of the pool."""
    prompt, outputs = 1000, 64
    slots = SlotAllocator(8 * (prompt + 4 * outputs))
    live: list[list[int]] = []
    for turn in range(100):
        if len(live) == 7:
            slots.give(live.pop(turn % 3))
        mine = slots.take(prompt)
        together = sum(b - a == 1 for a, b in pairwise(mine))
        assert together >= 0.9 * len(mine), turn
        granted = slots.take(4 * outputs)
        assert sum(b - a == 1 for a, b in pairwise(granted)) >= 0.8 * len(granted), turn
        slots.give(granted[2 * outputs :])
        live.append(mine + granted[: 2 * outputs])
