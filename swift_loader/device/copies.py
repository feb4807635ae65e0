"""Copies to the device that are under way, and the host memory they read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from swift_loader.device.streams import CopyStream, Event

__all__ = ["Copies"]


class Copies:
    """Keeps each batch on the host until its copy is over.

    While a reference to the host's batch exists, its slot isn't written again and its memory stays mapped; holding one
    here is all it takes. Used by the loop's thread; `finish` by any, when the loop's is done.
    """

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._under_way: deque[tuple[Event, Any]] = deque()
        """With what the host has, oldest first."""

    def issue(self, move: Callable[[Any], Any], batch: Any) -> tuple[Any, Event]:
        """Return what `move` makes of a batch, and the event that passes when its copies are over."""
        try:
            with self._stream.copying():
                moved = move(batch)
        finally:  # a move that raises may have issued some copies before
            event = self._stream.record()
            self._under_way.append((event, batch))
            self.let_go()
        return moved, event

    def hand_over(self, moved: Any, event: Event) -> None:
        """Make a moved batch the loop's: what it does from here on comes after the copy."""
        self._stream.hand_over(moved, event)

    def let_go(self) -> None:
        """Drop the host's batches whose copies are over; doesn't wait."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()

    def finish(self) -> None:
        """Wait until all copies are over, and drop the host's batches. Idempotent."""
        try:
            if self._under_way:
                self._under_way[-1][0].synchronize()  # they are over in the order in which they were issued
        finally:
            self._under_way.clear()

    def __repr__(self) -> str:
        return f"<Copies {len(self._under_way)} under way>"
