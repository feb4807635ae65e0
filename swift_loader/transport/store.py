"""The worker's slots: creates segments, announces them to the trainer, and reuses them.

Runs in the worker, on one thread. The trainer maps a segment when the worker announces it. The segment is unmapped when
the trainer retires it instead of releasing it, or when it is free and no longer fits recent batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.messages import SegmentGone, SegmentMade
from swift_loader.transport.segments import Segment, capacity_for
from swift_loader.transport.slots import FreeSlots

if TYPE_CHECKING:
    from swift_loader.transport.channel import Channel


class SlotStore(Protocol):
    """Provides memory for the bulk data of batches."""

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return a slot of at least `nbytes` and its memory."""
        ...

    def release(self, slot: int) -> None:
        """Take back a slot."""
        ...


class SegmentStore:
    """Recycled slots in shared memory. If none is free, it creates a new one, so the worker never waits."""

    def __init__(self, send: Callable[[bytes], None], make: Callable[[int, int], Segment]) -> None:
        """Begin without slots. `send` sends a message to the trainer.

        `make` returns the segment of a new slot, given its number and bytes, once the trainer was told of it.
        """
        self._send = send
        self._make_segment = make
        self._free = FreeSlots()
        self._segments: dict[int, Segment] = {}
        self._next_slot = 0

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return a slot of at least `nbytes` and its memory.

        Raises `SharedMemoryFull` if a new segment is needed, and there is not enough memory.
        """
        slot = self._free.take(nbytes)
        for unfit in self._free.evict():
            del self._segments[unfit]
            self._send(SegmentGone(unfit).pack())
        if slot is None:
            slot = self._add(self._make_segment(self._next_slot, capacity_for(nbytes)))
        return slot, self._segments[slot].array()

    def release(self, slot: int) -> None:
        """Take back a slot whose batch isn't used any more."""
        self._free.release(slot)

    def retire(self, slot: int) -> None:
        """Unmap a slot that the trainer has already unmapped."""
        self._free.remove(slot)
        del self._segments[slot]

    @classmethod
    def of_memfds(cls, channel: Channel, kept: Iterable[Segment] = ()) -> SegmentStore:
        """Return a store of anonymous segments, whose descriptors the channel carries.

        `kept`: those that the trainer has already, as the first slots.
        """

        def make(slot: int, nbytes: int) -> Segment:
            segment, descriptor = Segment.create(nbytes)
            try:
                channel.send(SegmentMade(slot, nbytes).pack(), [descriptor])
            finally:
                os.close(descriptor)
            return segment

        store = cls(channel.send, make)
        for segment in kept:
            store.release(store._add(segment))
        return store

    def _add(self, segment: Segment) -> int:
        slot = self._next_slot
        self._segments[slot] = segment
        self._next_slot += 1
        self._free.add(slot, segment.nbytes)
        return slot


class HeapStore:
    """Slots on the heap, for batches that stay in this process. Each batch has its own, freed with the batch."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)
        """The memory of the slot that was taken last."""

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return new memory of `nbytes`."""
        self.memory = np.empty(nbytes, np.uint8)
        return 0, self.memory

    def release(self, slot: int) -> None:
        """Do nothing: the last reference frees the memory."""

    def lend(self, _slot: int, _used_nbytes: int, /) -> NDArray[np.uint8]:
        """Return the memory of the batch that was built last, and forget it."""
        memory, self.memory = self.memory, np.empty(0, np.uint8)
        return memory
