"""A device whose copies are made as late as it likes, as a GPU's may be, and that remembers what it was told when."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class FakeEvent:
    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device = device
        self.number = number

    def query(self) -> bool:
        return self._device.num_passed > self.number

    def synchronize(self) -> None:
        self._device.log.append(f"wait for {self.number}")
        while not self.query():
            self._device.advance()


class FakeDevice:
    """A `CopyStream`, and what moves batches; until its event has passed, a moved array is something else."""

    def __init__(self, lag: int = 0) -> None:
        self.log: list[str] = []
        self.num_passed = 0
        """Events that have passed."""
        self._lag = lag
        """How many events may be behind before the oldest one passes by itself."""
        self._num_recorded = 0
        self._is_copying = False
        self._queue: deque[tuple[int, Array] | FakeEvent] = deque()
        """Copies, each of an address to an array, and events."""

    @contextmanager
    def copying(self, batch: Any) -> Iterator[None]:
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    def copy(self, host: Array) -> Array:
        """Return what an array will be on the device."""
        assert self._is_copying, "a copy was issued outside of the side stream"
        self.log.append(f"copy {self._num_recorded}")
        assert host.flags.c_contiguous
        there = np.full(host.shape, 255, np.uint8) if host.dtype == np.uint8 else np.full(host.shape, -1, host.dtype)
        self._queue.append((host.ctypes.data, there))
        return there

    def catch_up(self) -> None:
        self.log.append("catch up")

    def record(self) -> FakeEvent:
        assert not self._is_copying
        event = FakeEvent(self, self._num_recorded)
        self._num_recorded += 1
        self.log.append(f"event {event.number}")
        self._queue.append(event)
        while self._num_recorded - self.num_passed > self._lag:
            self.advance()
        return event

    def hand_over(self, batch: Any, event: Any) -> None:
        """What the loop does with the batch comes after the event, some time: nobody waits."""
        self.log.append(f"hand over {event.number}")

    def run(self) -> None:
        """Do all there is to do; then the loop may look at what it was handed."""
        while self.num_passed < self._num_recorded:
            self.advance()

    def advance(self) -> None:
        """Make the copies up to the next event."""
        while not isinstance(work := self._queue.popleft(), FakeEvent):
            address, there = work
            # By address, as hardware does: it keeps nothing alive. From /proc, where unmapped memory is an error.
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                memory.seek(address)
                there.reshape(-1).view(np.uint8)[:] = np.frombuffer(memory.read(there.nbytes), np.uint8)
        self.num_passed += 1

    def watch(self, host: Any, number: int) -> None:
        """Remember when the host's batch is let go."""
        weakref.finalize(host, self.log.append, f"release {number}")
