import pytest

from ouro_sgl.errors import IntegrityError
from ouro_sgl.kvcache.allocator import SlotAllocator


def test_takes_and_gives() -> None:
    slots = SlotAllocator(4)
    assert slots.take(3) == [0, 1, 2]
    assert len(slots) == 1
    slots.give([1])
    assert slots.take(2) == [1, 3]  # the slot freed last comes first
    assert slots.take(0) == []
    assert slots.free_slots() == []


def test_refuses_to_overdraw_and_changes_nothing() -> None:
    slots = SlotAllocator(2)
    with pytest.raises(IntegrityError, match="3 slots wanted, 2"):
        slots.take(3)
    assert sorted(slots.take(2)) == [0, 1]
