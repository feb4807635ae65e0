"""Copies to the device that are under way, and the host memory they read."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from swift_loader.device.streams import CopyStream, Event

__all__ = ["Copies"]


class Copies:
    """Keeps each batch on the host until its copy is over.

    While a reference to the host's batch exists, its slot isn't written again and its memory stays mapped; holding one
    here is all it takes. Used by the loop's thread, and closed by any, at any time.
    """

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        # Reentrant: a finaliser or a signal handler may close the loader at any point of a thread that has it.
        self._lock = threading.RLock()
        self._under_way: deque[tuple[Event, Any]] = deque()
        """With what the host has, oldest first."""
        self._is_closed = False
        self._owner_pid = os.getpid()

    def issue(self, move: Callable[[Any], Any], batch: Any) -> tuple[Any, Event]:
        """Return what `move` makes of a batch, and the event that passes when its copies are over."""
        try:
            with self._stream.copying(batch):
                moved = move(batch)
        finally:  # a move that raises may have issued some copies before
            event = self._stream.record()
            with self._lock:
                self._under_way.append((event, batch))
                if self._is_closed:  # in the meantime, and nobody comes back to let it go
                    event.synchronize()
            self.let_go()
        return moved, event

    def catch_up(self) -> None:
        """Have the copies from now on come after what the loop has queued so far."""
        self._stream.catch_up()

    def hand_over(self, moved: Any, event: Event) -> None:
        """Make a moved batch the loop's: what it does from here on comes after the copy."""
        self._stream.hand_over(moved, event)

    def let_go(self) -> None:
        """Drop the host's batches whose copies are over; doesn't wait."""
        dropped: deque[Any] = deque()
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                dropped.append(self._under_way.popleft())
        del dropped  # outside the lock: the user's objects may have finalisers

    def wait(self) -> None:
        """Block until the copies issued so far are over."""
        with self._lock:
            last = self._under_way[-1][0] if self._under_way else None
        if last is not None:
            last.synchronize()
        self.let_go()

    def close(self) -> None:
        """Wait until all copies are over, and drop the host's batches. Idempotent."""
        if os.getpid() != self._owner_pid:  # a fork of the trainer has no copies under way, and no device
            return
        with self._lock:
            self._is_closed = True
            dropped, self._under_way = self._under_way, deque()
            if dropped:
                dropped[-1][0].synchronize()  # they are over in the order in which they were issued

    def __repr__(self) -> str:
        return f"<Copies {len(self._under_way)} under way>"
