"""The memory of the batches of actors: slots of this process, into which each batch is copied out of Ray's object.

So batches can be written, and those that the user keeps keep no object in the store.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.scheduler.delivery import Lease
from swift_loader.transport.messages import NO_SLOT, Batch
from swift_loader.transport.segments import PrivateSlots, Segment


class ActorMemory(WorkerMemory):
    """The memory of one actor's batches. It has no segments of its own."""

    def __init__(self, slots: PrivateSlots) -> None:
        """`slots`: of all actors of a loader. The thread that leads uses them."""
        super().__init__(max_segments=0)
        self._slots = slots
        self._slot = NO_SLOT
        """Of the batch that has arrived, and isn't lent."""

    def arrive(self, memory: NDArray[np.uint8] | None) -> None:
        """Copy what came with an answer. The answer's last message announces the batch in it."""
        if memory is not None:
            self._slot, into = self._slots.take(memory.nbytes)
            np.copyto(into[: memory.nbytes], memory)

    def segment_of(self, batch: Batch) -> Segment | None:
        """Return where the batch that has arrived lies. None if it is so small that it is in the message."""
        if batch.slot == NO_SLOT:
            return None
        if self._slot == NO_SLOT or self._slots.memory_of(self._slot).nbytes < batch.used_nbytes:
            raise ProtocolError(f"an actor announced a batch of {batch.used_nbytes} bytes that didn't come with it")
        return self._slots.memory_of(self._slot)

    def lend(self, batch: Batch) -> tuple[NDArray[np.uint8], Lease | None]:
        """Return the memory of the batch that has arrived. It is the batch's as long as a view of it exists."""
        self.segment_of(batch)
        slot, self._slot = self._slot, NO_SLOT
        return self._slots.lend(slot, batch.used_nbytes), None

    def discard(self, batch: Batch) -> None:  # noqa: ARG002 - there is but one
        """Free the slot of the batch that has arrived."""
        if self._slot != NO_SLOT:
            self._slots.release(self._slot)
            self._slot = NO_SLOT
