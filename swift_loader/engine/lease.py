"""How the trainer notices that nobody uses a batch any more.

All arrays and tensors of a batch are views of one `Lease`; the user may slice them, keep a part and drop the rest. When
the last view dies, the lease dies, and its slot goes back to the worker. Runs on any thread, at any point where Python
may drop a reference, so it takes no lock: it only removes from a dict and appends to a deque, both atomic.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.segments import Segment

__all__ = ["LeaseBook"]

MAX_HELD_BYTES = 1 << 30
"""What the user may keep of one worker's slots before further batches are copied out of them."""

MAX_HELD_SLOTS = 512
"""The same, as a count: each slot is a mapping of its own, and a process may have 65,530 of them."""


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a slot, for as long as something refers to them.

    A subclass of ndarray, because NumPy makes views refer to the bottom of a chain of plain arrays, past any array in
    between, but stops at a change of type.
    """

    _book: LeaseBook | None = None
    _slot = 0
    _segment: Segment | None = None
    """Keeps the memory mapped, also when the worker is long gone."""

    def bind(self, book: LeaseBook, slot: int, segment: Segment) -> None:
        """Say whose slot this is."""
        self._book, self._slot, self._segment = book, slot, segment

    def __del__(self) -> None:
        if self._book is not None:  # None: a view that the user made of the lease itself
            self._book.end(self._slot)


class LeaseBook:
    """The slots of one worker that batches are in."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """slot -> nbytes"""
        self._largest = 0
        """Bytes of the largest slot so far."""
        self._ended: deque[int] = deque()

    def begin(self, slot: int, segment: Segment) -> NDArray[np.uint8]:
        """Return `(nbytes,) uint8` over a slot; the slot is in use while a reference to it exists."""
        lease = _Lease((segment.nbytes,), np.uint8, buffer=segment.memory)
        self._held[slot] = segment.nbytes
        self._largest = max(self._largest, segment.nbytes)
        lease.bind(self, slot, segment)
        memory: NDArray[np.uint8] = lease
        return memory

    def end(self, slot: int) -> None:
        """Note that a slot may be written again."""
        self._held.pop(slot, None)
        self._ended.append(slot)

    def take_ended(self, at_most: int) -> list[int]:
        """Return the slots whose batches have gone since the last call, oldest first."""
        ended: list[int] = []
        while self._ended and len(ended) < at_most:
            ended.append(self._ended.popleft())
        return ended

    @property
    def is_full(self) -> bool:
        """Whether the user keeps so much that batches should be copied instead."""
        num_held = len(self._held)
        if num_held * self._largest < MAX_HELD_BYTES:  # nearly always, and then there is nothing to sum up
            return num_held >= MAX_HELD_SLOTS
        return num_held >= MAX_HELD_SLOTS or sum(list(self._held.values())) >= MAX_HELD_BYTES

    def __repr__(self) -> str:
        return f"<LeaseBook {len(self._held)} slots in use, {len(self._ended)} to give back>"
