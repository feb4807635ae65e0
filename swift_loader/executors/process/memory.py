"""The shared memory of one worker, as the trainer sees it: its segments, and the slots that batches lie in.

The thread that listens to the worker adds segments and lends slots. The thread that sends a task takes the slots that
have come back. Both only use operations of dicts and deques that are atomic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError
from swift_loader.executors.process.lease import LeaseBook
from swift_loader.scheduler.delivery import Lease
from swift_loader.transport.messages import NO_SLOT, Batch
from swift_loader.transport.segments import Segment
from swift_loader.transport.task import MAX_SLOTS_PER_TASK

MAX_COPIED_BYTES = 1 << 16
"""A batch up to this size is copied out at once if its slot is far too large for it. The copy takes a few µs."""

MIN_WASTE = 16
"""A slot is far too large if it is this many times as large as the batch."""


class ReturnedSlots(NamedTuple):
    """Slots that nobody uses any more."""

    released: list[int]
    """The worker may write to these again."""
    retired: list[int]
    """The worker must unmap these."""
    segments: list[Segment]
    """The memory of the retired slots. Unlocking and unmapping it takes a while, so drop it where nobody waits."""


class WorkerMemory:
    """The segments of one worker. A segment is one slot."""

    def __init__(self, max_segments: int) -> None:
        """Begin without segments.

        `max_segments`: how many a worker needs if the user keeps no batch. Free ones beyond this number are retired.
        """
        self.max_segments = max_segments
        """As above. Any thread may change it."""
        self._segments: dict[int, Segment] = {}
        """By slot."""
        self._leases = LeaseBook()

    def add(self, slot: int, segment: Segment) -> None:
        """Add a segment that the worker announced."""
        self._segments[slot] = segment

    def drop(self, slot: int) -> None:
        """Unmap a segment that the worker doesn't use any more."""
        if self._segments.pop(slot, None) is None:
            raise ProtocolError(f"a worker retired slot {slot}, which doesn't exist")

    def segment_of(self, batch: Batch) -> Segment | None:
        """Return the memory of a batch. None if the batch is so small that it is in the message."""
        if batch.slot == NO_SLOT:
            return None
        segment = self._segments.get(batch.slot)
        if segment is None:
            raise ProtocolError(f"a worker announced a batch in slot {batch.slot}, which doesn't exist")
        return segment

    def lend(self, batch: Batch) -> tuple[NDArray[np.uint8], Lease | None]:
        """Return the memory of a batch, and the lease of its slot. It lasts as long as a view of the memory exists."""
        segment = self.segment_of(batch)
        if segment is None:
            return np.empty(0, np.uint8), None
        used = min(batch.used_nbytes, segment.nbytes) or segment.nbytes
        if (used <= MAX_COPIED_BYTES and used * MIN_WASTE <= segment.nbytes) or self._leases.is_full:
            copied: NDArray[np.uint8] = segment.array()[:used].copy()
            self._leases.release(batch.slot)
            return copied, None
        memory = self._leases.lease(batch.slot, segment, used)
        return memory, self._leases.lease_of(batch.slot)

    def discard(self, batch: Batch) -> None:
        """Free the slot of a batch that nobody needs any more."""
        if batch.slot != NO_SLOT:
            self._leases.release(batch.slot)

    def take_returned(self) -> ReturnedSlots:
        """Return the slots that have come back since the last call, as far as one task can name them."""
        retired = self._leases.take_shared(MAX_SLOTS_PER_TASK)
        segments = [self._segments.pop(slot) for slot in retired]
        ended = self._leases.take_ended(MAX_SLOTS_PER_TASK - len(retired))
        for slot in self._surplus_of(ended) if len(self._segments) > self.max_segments else ():
            ended.remove(slot)
            retired.append(slot)
            segments.append(self._segments.pop(slot))
        return ReturnedSlots(ended, retired, segments)

    def _surplus_of(self, ended: list[int]) -> list[int]:
        """Return the slots to retire, of those that have come back.

        Retire the smallest ones, because a large slot fits any batch. Compare with all slots, because few come back
        together, often one. Slots that the loop holds don't count: in their place, the worker needs others.
        """
        taken = self._leases.taken
        num_surplus = len(self._segments) - len(taken) - self.max_segments
        if num_surplus <= 0:
            return []
        sizes = sorted(segment.nbytes for slot, segment in self._segments.copy().items() if slot not in taken)
        smallest = sorted(ended, key=lambda slot: self._segments[slot].nbytes)[:num_surplus]
        return [slot for slot in smallest if self._segments[slot].nbytes <= sizes[num_surplus - 1]]

    def take_free(self) -> list[Segment]:
        """Return the segments that no batch lies in, and that no fork of this process may have."""
        in_use = self._leases.not_free()
        return [self._segments.pop(slot) for slot in [*self._segments] if slot not in in_use]

    def take_segments(self) -> list[Segment]:
        """Return all segments and forget them. Batches that the user keeps stay valid."""
        segments, self._segments = list(self._segments.values()), {}
        return segments

    def __repr__(self) -> str:
        return f"<WorkerMemory of {len(self._segments)} segments, {self._leases!r}>"
