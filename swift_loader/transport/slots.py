"""Chooses the slot for the next batch: a free list, without I/O.

A slot is one segment, big enough for a batch. The worker owns it while it is free and while the worker writes it. From
the announcement on it belongs to the trainer, until the trainer says that the last reference to the batch is gone.

The sizes of batches change, so slots that no longer fit are given up. Time is counted in slots taken. A slot is too
small if it has been free for a while and every request since then needed more. It is too large if it is several times
larger than every request of a long period.
"""

from __future__ import annotations

from collections import deque

SMALL_AFTER = 8
"""A slot is given up if this many requests in a row needed more than its capacity."""

LARGE_AFTER = 128
"""A slot is given up if it was too large for at least this many requests in a row. The number is higher than for small
slots: large batches often come only now and then, and a large segment takes longer to make."""

TOO_LARGE = 4
"""A slot is too large if it has more than this many times the bytes of the largest batch."""

_SNUG = 8
"""A slot fits well if it is at most 1/8 of the batch, or one page, larger than the batch."""

_PAGE = 4096


class FreeSlots:
    """The slots that may be written. The most recently freed one is last: it is still in the processor's cache."""

    def __init__(self) -> None:
        self._capacities: dict[int, int] = {}
        self._free: list[int] = []
        self._num_taken = 0
        self._freed_at: dict[int, int] = {}
        """slot -> value of `_num_taken` when it was freed."""
        self._needs: deque[int] = deque(maxlen=SMALL_AFTER)
        """Bytes of the last `SMALL_AFTER` requests."""
        self._largest_need = 0
        """Bytes of the largest request in the current period of `LARGE_AFTER` requests."""
        self._largest_before: int | None = None
        """The same for the previous period; None during the first one."""

    def add(self, slot: int, capacity: int) -> None:
        """Add a new slot of `capacity` bytes. It is in use from the start."""
        self._capacities[slot] = capacity

    def take(self, nbytes: int) -> int | None:
        """Return the smallest free slot that holds `nbytes`, and mark it as in use; None if there is none.

        Among slots of similar size, the most recently freed one wins.
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

    def release(self, slot: int) -> None:
        """Take a slot back. Raises `KeyError` if it is unknown or already free."""
        if slot not in self._capacities or slot in self._free:
            raise KeyError(slot)
        self._free.append(slot)
        self._freed_at[slot] = self._num_taken

    def remove(self, slot: int) -> None:
        """Forget a slot that is in use. Raises `KeyError` if it is unknown or free."""
        if slot in self._free:
            raise KeyError(slot)
        del self._capacities[slot]

    def evict(self) -> list[int]:
        """Forget the free slots that no longer fit recent requests, and return them."""
        if self._num_taken % SMALL_AFTER or not self._free:  # checking now and then is enough
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
        """Return the capacity in bytes above which a slot is too large."""
        if self._largest_before is None:
            return float("inf")
        return max(TOO_LARGE * max(self._largest_need, self._largest_before), _PAGE)

    def __len__(self) -> int:
        return len(self._capacities)

    def __repr__(self) -> str:
        return f"<FreeSlots {len(self._free)} of {len(self._capacities)} free>"
