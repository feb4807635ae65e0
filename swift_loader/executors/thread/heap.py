"""Slots on the heap, for the batches of one worker thread. They are recycled, as those of processes are.

First-touch page faults make fresh memory slow: with recycled slots, batches of 10 to 40 MB take 0.6 times as long.
All arrays of a batch are views of one `_LentMemory`. When the last one dies, on any thread, its slot is free again.
"""

from __future__ import annotations

import mmap
import sys
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.messages import NO_SLOT
from swift_loader.transport.segments import capacity_for
from swift_loader.transport.slots import FreeSlots

MIN_FILL = 2
"""A batch that fills less than one part in `MIN_FILL` of its slot is copied out: the user may keep it for long."""


class _LentMemory(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a slot. It lives as long as any view of them.

    A subclass of ndarray, because a NumPy view skips plain arrays in a chain of views, but not a subclass.
    """

    _returned: deque[int] | None = None
    _slot = NO_SLOT

    def bind(self, returned: deque[int], slot: int) -> None:
        """Attach the slot, and where to note its end."""
        self._returned, self._slot = returned, slot

    def __del__(self) -> None:
        if self._returned is not None:  # None: a view that the user made
            self._returned.append(self._slot)


class RecycledHeap:
    """A store that the worker's thread uses. If no slot is free, it makes a new one, so the worker never waits."""

    def __init__(self, max_free: int) -> None:
        """Begin without slots. Free ones beyond `max_free` are given up."""
        self.max_free = max_free
        """As above. Any thread may change it."""
        self._free = FreeSlots()
        self._memories: dict[int, mmap.mmap] = {}
        """By slot."""
        self._num_used = 0
        """Slots that are written, or that batches are in."""
        self._returned: deque[int] = deque()
        """Slots whose batches have died. Any thread appends."""
        self._next_slot = 0

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return a slot of at least `nbytes` and its memory."""
        while self._returned:
            self.release(self._returned.popleft())
        slot = self._free.take(nbytes)
        for unfit in self._free.evict():
            del self._memories[unfit]
        if slot is None:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            self._memories[slot] = _new_memory(capacity_for(nbytes))
            self._free.add(slot, len(self._memories[slot]))
        self._num_used += 1
        return slot, np.frombuffer(self._memories[slot], np.uint8)

    def release(self, slot: int) -> None:
        """Take back a slot."""
        if len(self._memories) - self._num_used >= self.max_free:
            self._free.remove(slot)
            del self._memories[slot]
        else:
            self._free.release(slot)
        self._num_used -= 1

    def lend(self, slot: int, used_nbytes: int) -> NDArray[np.uint8]:
        """Return the memory of a batch. Its slot is in use as long as a view of the memory exists."""
        if slot == NO_SLOT:
            return np.empty(0, np.uint8)
        memory = self._memories[slot]
        if used_nbytes * MIN_FILL < len(memory):
            copied: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[:used_nbytes].copy()
            self.release(slot)
            return copied
        lent = _LentMemory((used_nbytes,), np.uint8, buffer=memory)
        lent.bind(self._returned, slot)
        bound: NDArray[np.uint8] = lent
        return bound

    def __repr__(self) -> str:
        return f"<RecycledHeap, {self._num_used} of {len(self._memories)} slots in use>"


def _new_memory(nbytes: int) -> mmap.mmap:
    """Return pages of this process. They are no array, because views of an array would refer to it, not to the lease.

    A fork gets a copy.
    """
    if sys.platform == "win32":  # there are no flags and no forks
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
