"""Which slot the next batch is written to: a free list, without I/O.

A slot is one segment, big enough for a batch. The worker owns it while it is free and while it is written; from the
announcement on it belongs to the trainer, until the trainer says that the last reference to the batch is gone.
"""

from __future__ import annotations

__all__ = ["FreeSlots"]


class FreeSlots:
    """The slots that may be written, the most recently freed one last: it is still in the processor's cache."""

    def __init__(self) -> None:
        self._capacities: dict[int, int] = {}
        self._free: list[int] = []

    def add(self, slot: int, capacity: int) -> None:
        """Take in a new slot of `capacity` bytes, in use from the start."""
        self._capacities[slot] = capacity

    def take(self, nbytes: int) -> int | None:
        """Return the most recently freed slot that holds `nbytes`, now in use; None if there is none."""
        for position in range(len(self._free) - 1, -1, -1):
            if self._capacities[self._free[position]] >= nbytes:
                return self._free.pop(position)
        return None

    def give(self, slot: int) -> None:
        """Take a slot back.

        Raises:
            KeyError: The slot is unknown, or free already.
        """
        if slot not in self._capacities or slot in self._free:
            raise KeyError(slot)
        self._free.append(slot)

    def remove(self, slot: int) -> None:
        """Forget a slot that is in use.

        Raises:
            KeyError: The slot is unknown, or free.
        """
        if slot in self._free:
            raise KeyError(slot)
        del self._capacities[slot]

    def __len__(self) -> int:
        return len(self._capacities)

    def __repr__(self) -> str:
        return f"<FreeSlots {len(self._free)} of {len(self._capacities)} free>"
