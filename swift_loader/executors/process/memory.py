"""The shared memory of one worker, as the trainer sees it: its segments, and the slots that batches lie in.

The thread that listens to the worker adds segments and lends slots. The thread that sends a task takes the slots that
have come back. Both only use operations of dicts and deques that are atomic.

All arrays and tensors of a batch are views of one `Leased`. When the last view dies, the lease dies, and its slot goes
back to the worker. If the trainer forked while the user had the batch, the slot is retired instead, because the child
may still use it.
The end of a lease takes no lock: it only removes from a dict and appends to a deque, which are both atomic.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError
from swift_loader.executors.process.forks import FORKS
from swift_loader.scheduler.delivery import Lease, LeaseState
from swift_loader.transport.messages import NO_SLOT, Batch
from swift_loader.transport.segments import Segment
from swift_loader.transport.slots import Leased
from swift_loader.transport.task import MAX_SLOTS_PER_TASK

MAX_COPIED_BYTES = 1 << 16
"""A batch up to this size is copied out at once if its slot is far too large for it. The copy takes a few µs."""

MIN_WASTE = 16
"""A slot is far too large if it is this many times as large as the batch."""


MAX_HELD_BYTES = 1 << 30
"""What the user may keep of one worker's slots, in bytes. Beyond it, further batches are copied out. Batches that are
ready, or that are being copied to a device, don't count: other limits bound their number."""

MAX_WASTED_BYTES = 1 << 28
"""Slot bytes that the kept batches don't fill. The same limit."""

MAX_HELD_SLOTS = 512
"""The same limit as a count. Each slot is one mapping, and a process may have 65,530 mappings."""


class LeaseBook:
    """The slots of one worker that batches are in."""

    def __init__(self) -> None:
        self._held: dict[int, Lease] = {}
        """By slot."""
        self._largest = 0
        """Bytes of the largest slot so far."""
        self._ended: deque[int] = deque()
        self._shared: deque[int] = deque()
        """Those of the ended that a forked child may have."""

    def lease(self, slot: int, segment: Segment, used: int | None = None) -> NDArray[np.uint8]:
        """Return `(nbytes,) uint8` over a slot; the slot is in use while a reference to it exists.

        `used`: how many bytes of it the batch fills; None: all.
        """
        lease = Lease(segment.nbytes, segment.nbytes - (segment.nbytes if used is None else used), FORKS)
        self._held[slot] = lease
        self._largest = max(self._largest, segment.nbytes)
        leased = Leased.over(segment.memory, segment.nbytes, segment, partial(self._end, lease), slot)
        lease.memory = ref(leased)
        return leased

    def _end(self, lease: Lease, slot: int) -> None:
        is_shared = lease.seen_since is not None and lease.forks.may_have_seen(lease.seen_since)
        if is_shared:
            self._shared.append(slot)  # first, see `not_free`
        if self._held.get(slot) is lease:  # a retired slot's number may be another one's by now
            del self._held[slot]
        if not is_shared:
            self.release(slot)  # last: then the next batch may be in it, with a lease of its own

    def lease_of(self, slot: int) -> Lease | None:
        """Return how a slot is in use; None if it isn't."""
        return self._held.get(slot)

    @property
    def taken(self) -> set[int]:
        """The slots in use whose batches the loop has, or a copy for it reads."""
        # In one step: building a list of items may run the garbage collector, which may end a lease.
        held = self._held.copy()
        return {slot for slot, lease in held.items() if lease.state is not LeaseState.READY}

    def release(self, slot: int) -> None:
        """Note that no batch is in a slot any more, so that it may be written again."""
        self._ended.append(slot)

    def not_free(self) -> set[int]:
        """Return the slots that are in use, or that a forked child may have. A lease may end meanwhile."""
        return {*self._held.copy(), *self._shared.copy()}

    def take_returned(self, at_most: int) -> tuple[list[int], list[int]]:
        """Return the slots that have come back since the last call, oldest first.

        First those that may be written again, then those that must never be.
        """
        retired, ended = list[int](), list[int]()
        while self._shared and len(retired) < at_most:
            retired.append(self._shared.popleft())
        while self._ended and len(ended) < at_most - len(retired):
            ended.append(self._ended.popleft())
        return ended, retired

    @property
    def is_full(self) -> bool:
        """Whether the user keeps so much that batches should be copied instead."""
        num_held = len(self._held)
        if num_held < MAX_HELD_SLOTS and num_held * self._largest < min(MAX_WASTED_BYTES, MAX_HELD_BYTES):
            return False  # and there is nothing to sum up
        kept = [lease for lease in list(self._held.values()) if lease.state is LeaseState.KEPT]
        num_bytes, num_wasted = sum(lease.nbytes for lease in kept), sum(lease.num_wasted for lease in kept)
        return len(kept) >= MAX_HELD_SLOTS or num_bytes >= MAX_HELD_BYTES or num_wasted >= MAX_WASTED_BYTES


ReturnedSlots = tuple[list[int], list[int], list[Segment]]
"""Slots that nobody uses any more: those that the worker may write to again, those that it must unmap, and their
memory. Unlocking and unmapping it takes a while, so drop it where nobody waits."""


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
        ended, retired = self._leases.take_returned(MAX_SLOTS_PER_TASK)
        segments = [self._segments.pop(slot) for slot in retired] if retired else []
        for slot in self._surplus_of(ended) if len(self._segments) > self.max_segments else ():
            ended.remove(slot)
            retired.append(slot)
            segments.append(self._segments.pop(slot))
        return ended, retired, segments

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
