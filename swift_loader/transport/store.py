"""The worker's slots: makes segments, announces them, lends them out.

Runs in the worker, on one thread. The trainer maps a segment when it is announced. It is unmapped when the trainer
retires it instead of giving it back, or when it has been given back and doesn't fit the batches of nowadays.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.channel import Channel
from swift_loader.transport.messages import SegmentGone, SegmentMade
from swift_loader.transport.segments import Segment, capacity_for
from swift_loader.transport.slots import FreeSlots

__all__ = ["HeapStore", "SegmentStore", "SlotStore"]


class SlotStore(Protocol):
    """Where the bulk data of batches goes."""

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return a slot of at least `nbytes` and its memory."""
        ...

    def give(self, slot: int) -> None:
        """Take back a slot."""
        ...


class SegmentStore:
    """Slots in shared memory, recycled; a new one is made when none is free, so that the worker never waits."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._free = FreeSlots()
        self._segments: dict[int, Segment] = {}
        self._next_slot = 0

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return a slot of at least `nbytes` and its memory.

        Raises:
            SharedMemoryFull: A new segment is needed and can't be had.
        """
        slot = self._free.take(nbytes)
        for unfit in self._free.give_up():
            del self._segments[unfit]
            self._channel.send(SegmentGone(unfit).pack())
        if slot is None:
            slot = self._make(capacity_for(nbytes))
        return slot, self._segments[slot].array()

    def give(self, slot: int) -> None:
        """Take back a slot whose batch is gone."""
        self._free.give(slot)

    def retire(self, slot: int) -> None:
        """Unmap a slot that the trainer has unmapped."""
        self._free.remove(slot)
        del self._segments[slot]

    def _make(self, nbytes: int) -> int:
        slot = self._next_slot
        segment, descriptor = Segment.create(nbytes)
        try:
            self._channel.send(SegmentMade(slot, nbytes).pack(), [descriptor])
        finally:
            os.close(descriptor)
        self._next_slot += 1
        self._segments[slot] = segment
        self._free.add(slot, nbytes)
        return slot

    def __repr__(self) -> str:
        return f"<SegmentStore {self._free!r}>"


class HeapStore:
    """Slots on the heap, one per batch, freed with it: for batches that stay in this process."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)
        """Of the last slot taken."""

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return fresh memory."""
        self.memory = np.empty(nbytes, np.uint8)
        return 0, self.memory

    def give(self, slot: int) -> None:
        """Nothing: the memory goes with its last reference."""
