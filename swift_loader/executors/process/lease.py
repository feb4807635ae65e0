"""Notices when nobody uses a batch any more.

All arrays and tensors of a batch are views of one `LeasedMemory`. The user may slice them, keep a part and drop the
rest. When the last view dies, the lease dies, and its slot goes back to the worker. If the trainer forked in between,
the slot is retired instead, because the child may still use it. A lease may die on any thread, wherever Python drops a
reference. So its end takes no lock: it only removes from a dict and appends to a deque, which are both atomic.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from swift_loader.executors.process.forks import FORKS, Forks
from swift_loader.scheduler.delivery import Lease, LeaseState
from swift_loader.transport.segments import Segment

MAX_HELD_BYTES = 1 << 30
"""What the user may keep of one worker's slots, in bytes. Beyond it, further batches are copied out. Batches that are
ready, or that are being copied to a device, don't count: other limits bound their number."""

MAX_WASTED_BYTES = 1 << 28
"""Slot bytes that the kept batches don't fill. The same limit."""

MAX_HELD_SLOTS = 512
"""The same limit as a count. Each slot is one mapping, and a process may have 65,530 mappings."""


class LeasedMemory(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a slot. It lives as long as any view of them.

    A subclass of ndarray, because a NumPy view refers to the last array in a chain of plain arrays and skips those in
    between, but it doesn't skip a subclass.
    """

    _book: LeaseBook | None = None
    _slot = 0
    _segment: Segment | None = None
    """Keeps the memory mapped, even when the worker is gone."""
    _stamp: object = None
    """Tells whether the trainer forked since the lease began."""

    def bind(self, book: LeaseBook, slot: int, segment: Segment) -> None:
        """Attach the slot, its memory and the book that gets it back."""
        self._stamp = FORKS.stamp
        self._book, self._slot, self._segment = book, slot, segment

    def __del__(self, _forks: Forks = FORKS) -> None:  # bound here: at exit, the module's names may be gone
        if self._book is not None:  # None: a view that the user made of the lease itself
            self._book.release(self._slot, is_shared=_forks.may_have_seen(self._stamp))


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

    def lease(self, slot: int, segment: Segment, used: int | None = None) -> LeasedMemory:
        """Return `(nbytes,) uint8` over a slot; the slot is in use while a reference to it exists.

        `used`: how many bytes of it the batch fills; None: all.
        """
        leased: LeasedMemory = LeasedMemory((segment.nbytes,), np.uint8, buffer=segment.memory)
        self._held[slot] = Lease(segment.nbytes, segment.nbytes - (segment.nbytes if used is None else used))
        self._largest = max(self._largest, segment.nbytes)
        leased.bind(self, slot, segment)
        return leased

    def lease_of(self, slot: int) -> Lease | None:
        """Return how a slot is in use; None if it isn't."""
        return self._held.get(slot)

    @property
    def taken(self) -> set[int]:
        """The slots in use whose batches the loop has, or a copy for it reads."""
        held = (
            self._held.copy()
        )  # in one step: building a list of items may run the garbage collector, which may end a lease
        return {slot for slot, lease in held.items() if lease.state is not LeaseState.READY}

    def release(self, slot: int, *, is_shared: bool = False) -> None:
        """Note that a slot isn't in use any more; `is_shared` tells that a forked child may have it still."""
        (self._shared if is_shared else self._ended).append(slot)  # first, see `not_free`
        self._held.pop(slot, None)

    def not_free(self) -> set[int]:
        """Return the slots that are in use, or that a forked child may have. A lease may end meanwhile."""
        return {*self._held.copy(), *self._shared.copy()}

    def take_ended(self, at_most: int) -> list[int]:
        """Return the slots that have come back since the last call and may be written again, oldest first."""
        return _take(self._ended, at_most)

    def take_shared(self, at_most: int) -> list[int]:
        """Return the slots that have come back since the last call and must never be written again, oldest first."""
        return _take(self._shared, at_most)

    @property
    def is_full(self) -> bool:
        """Whether the user keeps so much that batches should be copied instead."""
        num_held = len(self._held)
        if num_held < MAX_HELD_SLOTS and num_held * self._largest < min(MAX_WASTED_BYTES, MAX_HELD_BYTES):
            return False  # and there is nothing to sum up
        kept = [lease for lease in list(self._held.values()) if lease.state is LeaseState.KEPT]
        num_bytes, num_wasted = sum(lease.nbytes for lease in kept), sum(lease.num_wasted for lease in kept)
        return len(kept) >= MAX_HELD_SLOTS or num_bytes >= MAX_HELD_BYTES or num_wasted >= MAX_WASTED_BYTES

    def __repr__(self) -> str:
        return f"<LeaseBook {len(self._held)} slots in use, {len(self._ended)} to give back>"


def _take(slots: deque[int], at_most: int) -> list[int]:
    taken: list[int] = []
    while slots and len(taken) < at_most:
        taken.append(slots.popleft())
    return taken
