"""The events of the worker threads, for the loop's thread.

    worker threads ──post──► deque ──wait──► loop's thread

Any thread may post. It takes no lock that the loop's thread holds, so a signal handler may interrupt `wait` anywhere.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable

from swift_loader.scheduler.events import Event

__all__ = ["ThreadInbox"]

_MAX_WAIT_S = 1e6
"""A lock can't be waited for much longer. A caller that waits longer calls again."""


class ThreadInbox:
    """Events, in the order in which they were posted."""

    def __init__(self) -> None:
        self.interrupt: Exception | None = None
        self.is_taking_in = False
        self.num_moves = 0
        """How often `wait` has begun or ended to block: odd while it blocks. Other threads may read it."""
        self._events: deque[Event] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Rung after each change of the other two. It is apart from the events because an interrupt may lose a ring."""
        self._is_woken = False

    def post(self, events: Iterable[Event]) -> None:
        """Add events. Thread-safe."""
        self._events.extend(events)
        self._bell.put(None)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the threads have posted; see `executors.base.Inbox.wait`."""
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_WAIT_S)
        while not self._events and not self._is_woken:
            if not self._await_ring(limit_s):
                break
        self._silence()
        self.is_taking_in = bool(self._events)
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _await_ring(self, limit_s: float | None) -> bool:
        """Block until the bell rings. Return False if it doesn't in time."""
        self.num_moves += 1
        try:
            self._bell.get(timeout=limit_s)
        except queue.Empty:
            return False
        finally:
            self.num_moves += 1
        return True

    def _silence(self) -> None:
        """Forget earlier rings. Their events are in the deque, where `wait` looks next."""
        while not self._bell.empty():
            self._bell.get()

    def wake(self) -> None:
        """End the current `wait` and all later ones, until `sleep`. Thread-safe."""
        self._is_woken = True
        self._bell.put(None)

    def sleep(self) -> None:
        """Let `wait` block again."""
        self._is_woken = False

    def __repr__(self) -> str:
        return f"<ThreadInbox of {len(self._events)} events>"
