"""A fake GPU that delays copies and logs calls, and a fake of page-locking.

Its two streams run their work in order, only when someone waits or too much is queued. Memory is allocated as by
torch's caching allocator: the next copy uses a freed block again, because it runs after the copies before it. A block
that was recorded on the loop's stream is used again only after that stream has done the work queued before the free.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.device.streams import CopyStream, Event, Transfer
from swift_loader.scheduler.delivery import Delivery

Array = NDArray[Any]

MAX_QUEUED = 1024
"""How much work the loop's stream takes before the loop has to wait, as CUDA has a limit."""


class FakeEvent(Event):
    """A point in the work of one of the streams."""

    def __init__(self, device: FakeDevice, advance: Callable[[], None], name: str) -> None:
        self._device = device
        self._advance = advance
        self.name = name
        self.has_passed = False

    @property
    def number(self) -> int:
        return int(self.name)

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self._device.log.append(f"wait for {self.name}")
        self.reach()

    def reach(self) -> None:
        """Have the stream do its work up to here."""
        while not self.has_passed:
            self._advance()


class Moving:
    """Moves the batch of a delivery by a function."""

    def __init__(self, move: Callable[[Any, Transfer], Any]) -> None:
        self._move = move

    def move(self, delivery: Delivery, transfer: Transfer) -> Any:
        return self._move(delivery.batch, transfer)

    def key_of(self, delivery: Delivery) -> int:
        return delivery.number

    def is_ready(self) -> bool:
        return False

    def take(self) -> Delivery:
        raise StopIteration


class Block:
    """A piece of the device's memory."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.is_recorded = False
        """Whether the loop's stream uses it."""


class FakeDevice(CopyStream):
    """A `CopyStream`, and what moves batches; until its event has passed, a moved array is something else."""

    def __init__(self, lag: int = 0) -> None:
        """Make a device. `lag`: how many copies may be behind before the oldest one is made by itself."""
        self.log: list[str] = []
        self.num_passed = 0
        """Copies' events that have passed."""
        self.num_blocks = 0
        """Blocks of memory that were ever needed at a time."""
        self._lag = lag
        self._num_recorded = 0
        self._num_marks = 0
        self._is_copying = False
        self._side: deque[Callable[[], None]] = deque()
        self._loop: deque[Callable[[], None]] = deque()
        self._blocks: dict[int, Block] = {}
        """By id of the array that it is the memory of."""
        self._free: list[Block] = []

    # What the loader calls --------------------------------------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    def catch_up(self) -> None:
        self.log.append("catch up")
        mark = self.mark()
        self._side.append(mark.reach)

    def own(self, tensor: Any) -> Any:
        self.log.append("own")
        self.catch_up()
        return tensor.clone()

    def record(self) -> FakeEvent:
        assert not self._is_copying
        event = FakeEvent(self, self._advance_side, str(self._num_recorded))
        self._num_recorded += 1
        self.log.append(f"event {event.number}")
        self._side.append(lambda: self._pass(event))
        while self._num_recorded - self.num_passed > self._lag:
            self.advance()
        return event

    def mark(self) -> FakeEvent:
        event = FakeEvent(self, self._advance_loop, f"step {self._num_marks}")
        self._num_marks += 1
        self._launch(lambda: setattr(event, "has_passed", True))
        return event

    def hand_over(self, parts: Sequence[Any], event: Any) -> None:
        """What the loop does with the batch comes after the event, some time: nobody waits."""
        self.log.append(f"hand over {event.number}")
        self._launch(event.reach)
        for part in parts:
            self._blocks[id(part)].is_recorded = True

    # What a move and a loop call --------------------------------------------------------------------------------------

    def move(self, host: Array, transfer: Transfer) -> Array:
        there = self.copy(host)
        transfer.parts.append(there)
        return there

    def copy(self, host: Array) -> Array:
        """Return what an array will be on the device."""
        assert self._is_copying, "a copy was issued outside of the side stream"
        self.log.append(f"copy {self._num_recorded}")
        assert host.flags.c_contiguous
        there, block = self._allocate(host)
        address = host.ctypes.data
        self._side.append(lambda: _copy(address, block))
        return there

    def use(self, batch: Array, results: list[set[int]]) -> None:
        """Queue a step on a batch; when it runs, it adds the values of the batch's bytes to the results."""
        block = self._blocks[id(batch)]
        self._launch(lambda: results.append(set(block.data)))

    # Its work ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Do all there is to do; then the loop may look at what it was handed."""
        while self._side:
            self._advance_side()
        while self._loop:
            self._advance_loop()

    def advance(self) -> None:
        """Make the copies up to the next event."""
        num_passed = self.num_passed
        while self.num_passed == num_passed:
            self._advance_side()

    def watch(self, host: Any, number: int) -> None:
        """Remember when the host's batch is let go."""
        weakref.finalize(host, self.log.append, f"release {number}")

    def _advance_side(self) -> None:
        self._side.popleft()()

    def _advance_loop(self) -> None:
        self._loop.popleft()()

    def _pass(self, event: FakeEvent) -> None:
        event.has_passed = True
        self.num_passed += 1

    def _launch(self, work: Callable[[], None]) -> None:
        while len(self._loop) >= MAX_QUEUED:
            self._advance_loop()
        self._loop.append(work)

    # Its memory -------------------------------------------------------------------------------------------------------

    def _allocate(self, host: Array) -> tuple[Array, Block]:
        fitting = [block for block in self._free if len(block.data) == host.nbytes]
        if fitting:
            block = fitting[0]
            self._free.remove(block)
        else:
            block = Block(host.nbytes)
            self.num_blocks += 1
        block.is_recorded = False
        there = np.ndarray(host.shape, host.dtype, block.data)
        there[...] = 255 if host.dtype == np.uint8 else -1
        self._blocks[id(there)] = block
        weakref.finalize(there, self._forget, id(there), block).atexit = False
        return there, block

    def _forget(self, number: int, block: Block) -> None:
        del self._blocks[number]
        if block.is_recorded:
            self._loop.append(lambda: self._free.append(block))
        else:
            self._free.append(block)


def _copy(address: int, block: Block) -> None:
    # By address, as hardware does: it keeps nothing alive. From /proc, where unmapped memory is an error.
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        block.data[:] = memory.read(len(block.data))


class Registry:
    """Takes note instead of page-locking."""

    def __init__(self, *wrong: str | None) -> None:
        self._wrong = list(wrong)
        self.locked: dict[int, int] = {}
        self.log: list[str] = []
        self.is_stuck = False

    def register(self, address: int, nbytes: int) -> str | None:
        self.log.append("register")
        wrong = self._wrong.pop(0) if self._wrong else ""
        if wrong == "":
            self.locked[address] = nbytes
        return wrong

    def unregister(self, address: int) -> bool:
        self.log.append("unregister")
        assert "rw" in protection_of(address), "unlocked after it was unmapped"
        if self.is_stuck:
            return False
        self.locked.pop(address, None)
        return True


def protection_of(address: int) -> str:
    """Return the permissions of the mapping at an address; nothing if there is none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return line.split()[1]
    return ""
