"""The memory in which the batches of actors arrive: views of this node's object store, or recycled copies.

An object stays in the store as long as a view of it exists. Ray's own views are read-only, although the mapping isn't:
an object that nobody else refers to is the batch's alone, so the views made here can be written, as those of all other
workers. If the user keeps much, or the mapping can't be written, or a device is to read the batch, the object is copied
once, and freed.
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import partial

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.reader import SegmentLock
from swift_loader.runtime import ProcessOwner
from swift_loader.scheduler.delivery import Lease
from swift_loader.transport.messages import NO_SLOT, Batch
from swift_loader.transport.segments import PrivateSlots, Segment
from swift_loader.transport.slots import Leased

MAX_INLINE_BYTES = 2 << 20
"""Ray sends batches of up to this size with the answer. They lie in ordinary memory, and are always copied."""

MAX_SMALL_BYTES = 128 << 10
"""Copies of up to this size aren't recycled: fresh memory takes 10 µs."""

STORE_SHARE = 4
"""The views may hold one part in `STORE_SHARE` of the object store. Batches beyond are copied."""

_FROM_FORKS: list[object] = []
"""Objects whose views have died in a fork: it must not free them, because it shares Ray's sockets with the trainer."""


def _end_view(
    source: object, ended: deque[int], owner: ProcessOwner, from_forks: list[object], nbytes: int
) -> None:  # uses no global: at exit, the module's names may be gone
    if owner.is_here():
        ended.append(nbytes)
    else:
        from_forks.append(source)


class ArrivalStore:
    """The memory of all batches of a loader. The thread that leads uses it; views die on any thread."""

    def __init__(self, max_viewed: int, max_free: int, page_lock: SegmentLock | None) -> None:
        """Begin empty.

        `max_viewed`: how many bytes of the object store the views may hold. `max_free`: how many free slots are kept.
        `page_lock` locks each slot before a batch lies in it, see `MessageReader`. With it, all batches are copied
        into slots.
        """
        self.slots = PrivateSlots(max_free)
        self._max_viewed = max_viewed
        self._page_lock = page_lock
        self._owner = ProcessOwner()
        self._viewed = 0
        self._ended_views: deque[int] = deque()
        """Sizes of views that have died."""
        self._writable: tuple[int, int] = (0, 0)
        """Where the object store is mapped, if it can be written."""

    def keep(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the memory of a batch that has arrived, writable. It is the batch's as long as a view of it exists."""
        while self._ended_views:
            self._viewed -= self._ended_views.popleft()
        if self._page_lock is None:
            if memory.nbytes <= MAX_SMALL_BYTES:
                return np.array(memory)
            may_view = memory.nbytes > MAX_INLINE_BYTES and self._viewed + memory.nbytes <= self._max_viewed
            if may_view and self._is_writable(memory):
                return self._view(memory)
        return self._copy(memory)

    def _view(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        nbytes = memory.nbytes
        self._viewed += nbytes
        buffer = (ctypes.c_ubyte * nbytes).from_address(memory.ctypes.data)
        on_end = partial(_end_view, memory, self._ended_views, self._owner, _FROM_FORKS)
        return Leased.over(memoryview(buffer), nbytes, memory, on_end, nbytes)

    def _copy(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        slot, _ = self.slots.take(memory.nbytes)
        if self._page_lock is not None:
            self._page_lock.lock(self.slots.memory_of(slot))
        kept = self.slots.lend(slot, memory.nbytes, min_fill=0)
        np.copyto(kept, memory)
        return kept

    def _is_writable(self, memory: NDArray[np.uint8]) -> bool:
        begin = memory.ctypes.data
        end = begin + memory.nbytes
        if not self._writable[0] <= begin < end <= self._writable[1]:
            self._writable = _writable_store_at(begin) or self._writable
        return self._writable[0] <= begin < end <= self._writable[1]


def _writable_store_at(address: int) -> tuple[int, int] | None:
    """Return the range of the object store's mapping that contains this address; None if it can't be written.

    Only the store's main mapping counts, which lasts as long as the connection. It is a deleted file in /dev/shm.
    """
    try:
        with open("/proc/self/maps") as file:
            for line in file:
                span, permissions, *_, path = line.split(maxsplit=5)
                begin, end = (int(number, 16) for number in span.split("-"))
                if begin <= address < end:
                    is_store = path.startswith("/dev/shm/plasma")  # noqa: S108 - it isn't written here
                    return (begin, end) if is_store and permissions.startswith("rw-s") else None
    except (OSError, ValueError):
        return None
    return None


class ActorMemory(WorkerMemory):
    """The memory of one actor's batches. It has no segments: an actor writes to its own as soon as Ray has a batch."""

    def __init__(self, store: ArrivalStore) -> None:
        super().__init__(max_segments=0)
        self._store = store
        self._arrived: NDArray[np.uint8] | None = None

    def arrive(self, memory: NDArray[np.uint8] | None) -> None:
        """Take what came with an answer. The answer's last message announces the batch in it."""
        self._arrived = memory

    def lend(self, batch: Batch) -> tuple[NDArray[np.uint8], Lease | None]:
        """Return the memory of the batch that has arrived."""
        memory, self._arrived = self._arrived, None
        if batch.slot == NO_SLOT:
            return np.empty(0, np.uint8), None
        if memory is None or memory.nbytes < batch.used_nbytes:
            raise ProtocolError(f"an actor announced a batch of {batch.used_nbytes} bytes that didn't come with it")
        return self._store.keep(memory), None

    def discard(self, batch: Batch) -> None:  # noqa: ARG002 - there is but one
        """Free the batch that has arrived."""
        self._arrived = None

    def segment_of(self, batch: Batch) -> Segment | None:  # noqa: ARG002
        """Return None: the store tells of its own."""
        return None

    def add(self, slot: int, segment: Segment) -> None:
        """Raise: actors have no segments."""
        raise ProtocolError(f"an actor announced segment {slot} of {segment.nbytes} bytes, but actors have none")

    def take_segments(self) -> list[Segment]:
        """Return none, and forget what has arrived."""
        self._arrived = None
        return []
