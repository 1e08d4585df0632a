import pytest

from ouro_sgl.errors import IntegrityError
from ouro_sgl.kvcache.pool import SlotPool


def test_a_draw_evicts_what_is_cached_and_unlocked() -> None:
    pool = SlotPool(8, total_loops=2)
    pool.reserve(4)
    slots = pool.draw(4)
    node = pool.radix.extend(None, [1, 2], [slots[:2], slots[2:]], None)
    assert pool.available == 8
    pool.reserve(6)
    drawn = pool.draw(6)
    assert len(set(drawn)) == 6
    assert pool.radix.cached == 0
    assert not node.locks
    pool.check(drawn, [], 0)


def test_promises_never_exceed_what_there_is() -> None:
    pool = SlotPool(8, total_loops=2)
    pool.reserve(4)
    slots = pool.draw(4)
    node = pool.radix.extend(None, [1, 2], [slots[:2], slots[2:]], None)
    pool.radix.lock(node)
    with pytest.raises(IntegrityError, match="cannot be reserved"):
        pool.reserve(5)
    pool.reserve(4)
    pool.reserve(-4)
    with pytest.raises(IntegrityError):
        pool.reserve(-1)
    pool.check([], [node], 0)


def test_flush_returns_every_slot() -> None:
    pool = SlotPool(4, total_loops=2)
    pool.reserve(4)
    slots = pool.draw(4)
    pool.radix.extend(None, [1, 2], [slots[:2], slots[2:]], None)
    pool.flush()
    assert len(pool.allocator) == 4
    pool.check([], [], 0)


def test_the_check_sees_each_kind_of_damage() -> None:
    def fresh() -> tuple[SlotPool, list[int]]:
        pool = SlotPool(6, total_loops=1)
        pool.reserve(4)
        slots = pool.draw(4)
        pool.radix.extend(None, [1, 2], [slots[:2]], None)
        return pool, slots[2:]

    pool, owned = fresh()
    pool.check(owned, [], 0)
    with pytest.raises(IntegrityError, match="of the pool"):
        pool.check(owned[:1], [], 0)  # a slot leaked
    with pytest.raises(IntegrityError, match="of the pool"):
        pool.check([owned[0], owned[0]], [], 0)  # one owned twice
    with pytest.raises(IntegrityError, match="promised"):
        pool.check(owned, [], 1)
    pool.give(owned[:1])
    with pytest.raises(IntegrityError, match="of the pool"):
        pool.check(owned, [], 0)  # freed while owned
    pool, owned = fresh()
    (node,) = pool.radix.nodes()
    with pytest.raises(IntegrityError, match="locked 0 times by 1 rows"):
        pool.check(owned, [node], 0)
    node.size = 3
    with pytest.raises(IntegrityError, match="wrong size"):
        pool.check(owned, [], 0)
    pool, owned = fresh()
    pool.radix.evictable = 1
    with pytest.raises(IntegrityError, match="evictable"):
        pool.check(owned, [], 0)
