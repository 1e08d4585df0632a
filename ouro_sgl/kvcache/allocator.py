"""The free list of KV slots. Knows nothing of rows, nodes or reservations."""

from __future__ import annotations

from collections.abc import Iterable

from ouro_sgl.errors import IntegrityError


class SlotAllocator:
    """Slots ``0 .. num_slots - 1``, handed out last-freed first: the same calls give the same slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Remove ``count`` slots from the free list.

        Raises:
            IntegrityError: fewer are free; the caller must have made room.
        """
        if count > len(self._free):
            raise IntegrityError(f"{count} slots wanted, {len(self._free)} are free")
        at = len(self._free) - count
        taken = self._free[at:]
        del self._free[at:]
        taken.reverse()
        return taken

    def give(self, slots: Iterable[int]) -> None:
        """Put slots back. Nothing that was launched may still read or write them."""
        self._free.extend(slots)

    def free_slots(self) -> list[int]:
        """A copy of the free list, for integrity checks."""
        return list(self._free)
