"""All slots of a worker: the free list, the radix cache and what is promised to requests.

A *reservation* is a number of slots that a request will still draw in its life. Reservations are
only made out of free and evictable slots, so a draw can never fail:

    reserved <= free + evictable          (at all times)
"""

from __future__ import annotations

from collections.abc import Iterable

from ouro_sgl.errors import IntegrityError
from ouro_sgl.kvcache.allocator import SlotAllocator
from ouro_sgl.kvcache.radix import Node, RadixCache


class SlotPool:
    """``num_slots`` slots; ``radix`` is always there and stays empty where no prefix is cached."""

    def __init__(self, num_slots: int, total_loops: int) -> None:
        self.num_slots = num_slots
        self.allocator = SlotAllocator(num_slots)
        self.radix = RadixCache(total_loops)
        self.reserved = 0

    @property
    def available(self) -> int:
        """Slots that are neither used nor promised."""
        return len(self.allocator) + self.radix.evictable - self.reserved

    def reserve(self, count: int) -> None:
        """Promise ``count`` more slots; a negative count gives a promise back.

        Raises:
            IntegrityError: more would be promised than there is, or less than nothing.
        """
        if count > self.available or self.reserved + count < 0:
            raise IntegrityError(f"{count} slots cannot be reserved: {self.available} are available")
        self.reserved += count

    def draw(self, count: int) -> list[int]:
        """Turn ``count`` promised slots into real ones, evicting cached prefixes as needed."""
        missing = count - len(self.allocator)
        if missing > 0:
            self.allocator.give(self.radix.evict(missing))
        slots = self.allocator.take(count)
        self.reserved -= count
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Put slots back that nothing launched can read or write any more."""
        self.allocator.give(slots)

    def flush(self) -> None:
        """Empty the radix cache. No row may hold a node."""
        self.allocator.give(self.radix.clear())

    def flush_unlocked(self) -> None:
        """Drop every cached prefix that no row holds, and every earlier match."""
        self.allocator.give(self.radix.evict(self.radix.evictable))
        self.radix.version += 1

    def check(self, owned: list[int], held_nodes: Iterable[Node | None], reserved: int) -> None:
        """Every slot is exactly one of free, cached and ``owned``; locks and promises add up.

        Args:
            owned: the slots of all rows, each as often as rows claim it.
            held_nodes: the node that each row holds (None for none).
            reserved: the sum of what requests believe to be promised.

        Raises:
            IntegrityError: naming what does not hold.
        """
        radix = self.radix
        cached: list[int] = []
        evictable = 0
        locks: dict[int, int] = {}
        for node in held_nodes:
            while node is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                node = node.parent
        for entry in radix.nodes():
            slots = set().union(*entry.columns)
            cached.extend(slots)
            if len(slots) != entry.size or any(len(c) != len(entry.key) for c in entry.columns):
                raise IntegrityError(f"radix node of {len(entry.key)} tokens has a wrong size {entry.size}")
            if entry.locks != locks.get(id(entry), 0):
                raise IntegrityError(
                    f"radix node is locked {entry.locks} times by {locks.get(id(entry), 0)} rows"
                )
            if not entry.locks:
                evictable += entry.size
                if any(child.locks for child in entry.children.values()):
                    raise IntegrityError("an unlocked radix node has a locked child")
        if (len(cached), evictable) != (radix.cached, radix.evictable):
            raise IntegrityError(
                f"cached/evictable are {len(cached)}/{evictable}, counted {radix.cached}/{radix.evictable}"
            )
        free = self.allocator.free_slots()
        places = [*free, *cached, *owned]
        distinct = set(places)
        if len(places) != self.num_slots or distinct != set(range(self.num_slots)):
            raise IntegrityError(
                f"{len(free)} free + {len(cached)} cached + {len(owned)} owned slots, "
                f"{len(distinct)} of them distinct, are not the {self.num_slots} of the pool"
            )
        if reserved != self.reserved or self.available < 0:
            raise IntegrityError(
                f"{reserved} slots are promised, {self.reserved} by the books, {self.available} are left"
            )
