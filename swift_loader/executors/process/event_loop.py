"""An event loop for one thread: waits for descriptors and calls a function when one is readable.

Any other thread can wake it with `wake`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from swift_loader.executors.process.forks import FORKS
from swift_loader.transport.descriptors import new_eventfd


class EventLoop:
    """Waits in poll(2) and calls the functions of the readable descriptors."""

    def __init__(self) -> None:
        self._wake = new_eventfd()
        self._sources: dict[int, Callable[[], None]] = {}
        self._poll = select.poll()
        self.watch(self._wake, self._read_wake)
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns; -1 once closed."""
        return [self._wake]

    def watch(self, descriptor: int, source: Callable[[], None]) -> None:
        """Call `source` whenever the descriptor is readable or at its end."""
        self._sources[descriptor] = source
        self._poll.register(descriptor, select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor. Call it before the descriptor is closed. Idempotent."""
        if self._sources.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def run_once(self, timeout_s: float | None = None) -> None:
        """Wait until a descriptor is readable, at most `timeout_s`, and call its function."""
        for descriptor, _ in self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000):
            source = self._sources.get(descriptor)
            if source is not None:
                source()

    def run_until(self, is_done: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Run until `is_done()` is true. Return False if that takes longer than `limit_s`."""
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        while not is_done():
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                self.run_once(0)  # it may have arrived: this process may have been stopped meanwhile
                return is_done()
            self.run_once(left_s)
        return True

    def wake(self) -> None:
        """Wake the waiting thread, so that it checks whether it is done. Thread-safe. Does nothing once closed."""
        if not self.is_closed:
            os.eventfd_write(self._wake, 1)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._wake < 0

    def close(self) -> None:
        """Close the event descriptor. The thread must have ended. Idempotent."""
        if not self.is_closed:
            self.unwatch(self._wake)
            wake, self._wake = self._wake, -1  # first, see `Holder`
            os.close(wake)

    def _read_wake(self) -> None:
        os.eventfd_read(self._wake)
