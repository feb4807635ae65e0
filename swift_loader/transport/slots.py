"""Memory that is written again and again: which slot the next batch gets, without I/O.

A slot is one memory, big enough for a batch. In a worker process, the worker owns it while it is free and while the
worker writes it. From the announcement on it belongs to the trainer, until the trainer says that the last reference to
the batch is gone. In the trainer's own memory, it is lent as long as a view of the batch exists.

The sizes of batches change, so slots that no longer fit are given up. Time is counted in slots taken. A slot is too
small if it has been free for a while and every request since then needed more. It is too large if it is several times
larger than every request of a long period.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.messages import NO_SLOT

SMALL_AFTER = 8
"""A slot is given up if this many requests in a row needed more than its capacity."""

LARGE_AFTER = 128
"""A slot is given up if it was too large for at least this many requests in a row. The number is higher than for small
slots: large batches often come only now and then, and a large segment takes longer to make."""

TOO_LARGE = 4
"""A slot is too large if it has more than this many times the bytes of the largest batch."""

MIN_FILL = 0.5
"""A batch that fills less than this part of its slot isn't lent, but copied out: the user may keep it for long."""

_SNUG = 8
"""A slot fits well if it is at most 1/8 of the batch, or one page, larger than the batch."""

_PAGE = 4096


class Leased(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a batch. It lives as long as any view of them.

    All arrays and tensors of a batch are views of one. The user may slice them, keep a part and drop the rest. It may
    die on any thread, wherever Python drops a reference, so what its end calls takes no lock.

    A subclass of ndarray, because a NumPy view refers to the last array in a chain of plain arrays and skips those in
    between, but it doesn't skip a subclass.
    """

    _on_end: Callable[[int], object] | None = None
    """None: a view that the user made of this one."""
    _slot = 0
    _source: object = None

    @classmethod
    def over(
        cls, buffer: memoryview, nbytes: int, source: object, on_end: Callable[[int], object], slot: int
    ) -> NDArray[np.uint8]:
        """Return the first bytes of a buffer. `source` keeps them valid; `on_end` gets the slot after the last view."""
        leased: Leased = cls((nbytes,), np.uint8, buffer=buffer)
        leased._source, leased._on_end, leased._slot = source, on_end, slot
        return leased

    def __del__(self) -> None:  # uses no global: at exit, the module's names may be gone
        if self._on_end is not None:
            self._on_end(self._slot)


class Memory(Protocol):
    """What a slot is made of; `Segment`."""

    nbytes: int
    memory: memoryview


AMemory = TypeVar("AMemory", bound=Memory)


class RecycledSlots(Generic[AMemory]):
    """Numbered memories. If none is free, it makes another one, so nobody waits. One thread uses it.

    The most recently freed one is taken first: it is still in the processor's cache. First-touch page faults make fresh
    memory slow: with recycled slots, batches of 10 to 40 MB take 0.6 times as long.
    """

    def __init__(self, max_free: int | None = None) -> None:
        """Begin without slots. Free ones beyond `max_free` are given up; None: all stay that fit."""
        self.max_free = max_free
        """As above. Any thread may change it."""
        self._memories: dict[int, AMemory] = {}
        """By slot."""
        self._free: list[int] = []
        """The one that was freed last is last."""
        self._returned: deque[int] = deque()
        """Slots that were lent, whose batches have died. Any thread appends."""
        self._next_slot = 0
        self._num_taken = 0
        self._freed_at: dict[int, int] = {}
        """slot -> value of `_num_taken` when it was freed."""
        self._needs: deque[int] = deque(maxlen=SMALL_AFTER)
        """Bytes of the last `SMALL_AFTER` requests."""
        self._largest_need = 0
        """Bytes of the largest request in the current period of `LARGE_AFTER` requests."""
        self._largest_before: int | None = None
        """The same for the previous period; None during the first one."""

    def make(self, slot: int, nbytes: int) -> AMemory:
        """Return the memory of a new slot, of at least `nbytes`. A subclass says how."""
        raise NotImplementedError

    def drop(self, slot: int) -> None:
        """Do what is due when a free slot is given up."""

    def adopt(self, memory: AMemory) -> int:
        """Add a memory as the next slot, which is in use. Return the slot."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        self._memories[slot] = memory
        return slot

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return the smallest free slot that holds `nbytes`, or else a new one, and its memory. It is in use then.

        Among slots of similar size, the most recently freed one wins. Raises what making a slot raises.
        """
        while self._returned:
            self.release(self._returned.popleft())
        self._note_need(nbytes)
        slot = self._take_free(nbytes)
        self._give_up_unfit()
        if slot is None:
            slot = self.adopt(self.make(self._next_slot, nbytes))
        return slot, self.array(slot)

    def release(self, slot: int) -> None:
        """Take a slot back. Raises `KeyError` if it is unknown or already free."""
        if slot not in self._memories or slot in self._free:
            raise KeyError(slot)
        if self.max_free is not None and len(self._free) >= self.max_free:
            self.retire(slot)
            return
        self._free.append(slot)
        self._freed_at[slot] = self._num_taken

    def retire(self, slot: int) -> None:
        """Forget a slot that is in use. Raises `KeyError` if it is unknown or free."""
        if slot in self._free:
            raise KeyError(slot)
        del self._memories[slot]
        self._freed_at.pop(slot, None)

    def lend(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the first bytes of a slot, which is in use as long as a view of them exists.

        If they fill too little of it, they are copied out, and the slot is free.
        """
        if slot == NO_SLOT:
            return np.empty(0, np.uint8)
        memory = self._memories[slot]
        if nbytes < MIN_FILL * memory.nbytes:
            copied: NDArray[np.uint8] = self.array(slot)[:nbytes].copy()
            self.release(slot)
            return copied
        # Not `self`, which would keep all slots for one batch.
        return Leased.over(memory.memory, nbytes, memory, self._returned.append, slot)

    def array(self, slot: int) -> NDArray[np.uint8]:
        """Return `(nbytes,) uint8` over a slot. It is valid while the slot exists."""
        return np.frombuffer(self._memories[slot].memory, np.uint8)

    def _take_free(self, nbytes: int) -> int | None:
        best, best_capacity = -1, 0
        for position in range(len(self._free) - 1, -1, -1):
            capacity = self._memories[self._free[position]].nbytes
            if capacity >= nbytes and (best < 0 or capacity < best_capacity):
                best, best_capacity = position, capacity
                if capacity <= max(nbytes + nbytes // _SNUG, nbytes + _PAGE):
                    break
        if best < 0 or best_capacity > self._too_large():
            return None
        return self._free.pop(best)

    def _give_up_unfit(self) -> None:
        """Forget the free slots that no longer fit recent requests."""
        if self._num_taken % SMALL_AFTER or not self._free:  # checking now and then is enough
            return
        too_small, too_large = min(self._needs, default=0), self._too_large()
        for slot in self._free.copy():
            capacity, num_since = self._memories[slot].nbytes, self._num_taken - self._freed_at[slot]
            if capacity > too_large or (capacity < too_small and num_since >= SMALL_AFTER):
                self._free.remove(slot)
                self.retire(slot)
                self.drop(slot)

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
        return len(self._memories)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._free)} of {len(self._memories)} free>"


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

    def lend(self, _slot: int, _used_nbytes: int) -> NDArray[np.uint8]:
        """Return the memory of the batch that was built last, and forget it."""
        memory, self.memory = self.memory, np.empty(0, np.uint8)
        return memory


SlotStore = RecycledSlots[Any] | HeapStore
"""Where the bulk data of batches is written."""
