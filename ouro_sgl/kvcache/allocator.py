"""The free list of KV slots. Knows nothing of rows, nodes or reservations.

A GPU reads neighbouring slots several percent faster than scattered ones, so slots are kept in blocks of
neighbours: large draws take whole blocks, small ones and remainders come out of blocks that are broken
already, and a block is whole again when its last slot comes back.
"""

from __future__ import annotations

from collections.abc import Iterable

from ouro_sgl.errors import IntegrityError

BLOCK = 64  # slots


class SlotAllocator:
    """Slots ``0 .. num_slots - 1``; the same calls give the same slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._whole = list(range(num_slots // BLOCK - 1, -1, -1))  # blocks, the next one last
        self._broken: dict[int, list[int]] = {}  # by block, its free slots; the next one last
        if num_slots % BLOCK:
            self._broken[num_slots // BLOCK] = list(range(num_slots // BLOCK * BLOCK, num_slots))
        self._count = num_slots

    def __len__(self) -> int:
        """Number of free slots."""
        return self._count

    def take(self, count: int) -> list[int]:
        """Remove ``count`` slots from the free list.

        Raises:
            IntegrityError: fewer are free; the caller must have made room.
        """
        if count > self._count:
            raise IntegrityError(f"{count} slots wanted, {self._count} are free")
        self._count -= count
        taken: list[int] = []
        while count - len(taken) >= BLOCK and self._whole:
            taken += self._slots_of(self._whole.pop())
        while len(taken) < count:
            if not self._broken:
                block = self._whole.pop()
                self._broken[block] = list(self._slots_of(block))
            block, free = self._broken.popitem()
            free.sort()
            wanted = count - len(taken)
            taken += free[:wanted]
            if len(free) > wanted:
                self._broken[block] = free[wanted:]
        return taken

    def give(self, slots: Iterable[int]) -> None:
        """Put slots back. Nothing that was launched may still read or write them."""
        slots = list(slots)
        self._count += len(slots)
        at = 0
        while at < len(slots):
            slot = slots[at]
            block = slot // BLOCK
            if slot == block * BLOCK and slots[at : at + BLOCK] == list(self._slots_of(block)):
                self._whole.append(block)
                at += BLOCK
                continue
            free = self._broken.setdefault(block, [])
            free.append(slot)
            if len(free) == BLOCK:
                del self._broken[block]
                self._whole.append(block)
            at += 1

    def free_slots(self) -> list[int]:
        """A copy of the free list, for integrity checks."""
        whole = [slot for block in self._whole for slot in self._slots_of(block)]
        return whole + [slot for free in self._broken.values() for slot in free]

    @staticmethod
    def _slots_of(block: int) -> range:
        return range(block * BLOCK, (block + 1) * BLOCK)
