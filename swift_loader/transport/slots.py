"""Which slot the next batch is written to: a free list, without I/O.

A slot is one segment, big enough for a batch. The worker owns it while it is free and while it is written; from the
announcement on it belongs to the trainer, until the trainer says that the last reference to the batch is gone.

Sizes of batches change, and slots that don't fit any more are to be given up. Time is counted in slots taken: what has
been free for a while and is too small for all that was asked for meanwhile is outgrown; what is several times larger
than anything asked for in a long while is too large.
"""

from __future__ import annotations

from collections import deque

__all__ = ["FreeSlots"]

SMALL_AFTER = 8
"""Slots taken until one that is too small for all of them is given up."""

LARGE_AFTER = 128
"""Slots taken until one that is too large for all of them is given up. It is needed again sooner than a small one: a
large batch is often an exception, and a large segment takes longer to make."""

TOO_LARGE = 4
"""How many times larger than the largest batch that is."""

_SNUG = 8
"""A slot that is larger by no more than this part, or by a page, is as good as any."""

_PAGE = 4096


class FreeSlots:
    """The slots that may be written, the most recently freed one last: it is still in the processor's cache."""

    def __init__(self) -> None:
        self._capacities: dict[int, int] = {}
        self._free: list[int] = []
        self._num_taken = 0
        self._freed_at: dict[int, int] = {}
        """slot -> how many had been taken by then"""
        self._needs: deque[int] = deque(maxlen=SMALL_AFTER)
        """Bytes asked for lately."""
        self._largest_need = 0
        """Since the long period began, and in the one before it."""
        self._largest_before: int | None = None

    def add(self, slot: int, capacity: int) -> None:
        """Take in a new slot of `capacity` bytes, in use from the start."""
        self._capacities[slot] = capacity

    def take(self, nbytes: int) -> int | None:
        """Return the smallest free slot that holds `nbytes`, now in use; None if there is none.

        Of those that are about as large, the most recently freed one.
        """
        self._note_need(nbytes)
        best, best_capacity = -1, 0
        for position in range(len(self._free) - 1, -1, -1):
            capacity = self._capacities[self._free[position]]
            if capacity >= nbytes and (best < 0 or capacity < best_capacity):
                best, best_capacity = position, capacity
                if capacity <= max(nbytes + nbytes // _SNUG, nbytes + _PAGE):
                    break
        if best < 0 or best_capacity > self._too_large():
            return None
        return self._free.pop(best)

    def give(self, slot: int) -> None:
        """Take a slot back.

        Raises:
            KeyError: The slot is unknown, or free already.
        """
        if slot not in self._capacities or slot in self._free:
            raise KeyError(slot)
        self._free.append(slot)
        self._freed_at[slot] = self._num_taken

    def remove(self, slot: int) -> None:
        """Forget a slot that is in use.

        Raises:
            KeyError: The slot is unknown, or free.
        """
        if slot in self._free:
            raise KeyError(slot)
        del self._capacities[slot]

    def give_up(self) -> list[int]:
        """Return the free slots that don't fit what is asked for nowadays, which are forgotten."""
        if self._num_taken % SMALL_AFTER or not self._free:  # not each time: it needn't be at once
            return []
        too_small, too_large = min(self._needs, default=0), self._too_large()
        unfit = [
            slot
            for slot in self._free
            if self._capacities[slot] > too_large
            or (self._capacities[slot] < too_small and self._num_taken - self._freed_at[slot] >= SMALL_AFTER)
        ]
        for slot in unfit:
            self._free.remove(slot)
            del self._capacities[slot]
        return unfit

    def _note_need(self, nbytes: int) -> None:
        self._num_taken += 1
        self._needs.append(nbytes)
        self._largest_need = max(self._largest_need, nbytes)
        if self._num_taken % LARGE_AFTER == 0:
            self._largest_before, self._largest_need = self._largest_need, nbytes

    def _too_large(self) -> float:
        """Return the capacity beyond which a slot is too large."""
        if self._largest_before is None:
            return float("inf")
        return max(TOO_LARGE * max(self._largest_need, self._largest_before), _PAGE)

    def __len__(self) -> int:
        return len(self._capacities)

    def __repr__(self) -> str:
        return f"<FreeSlots {len(self._free)} of {len(self._capacities)} free>"
