"""The events of the worker threads.

    worker threads ──Mailbox.post──► deque ──ThreadInbox.wait──► the thread that leads

The loop's thread and one other take turns to lead, so there are two inboxes over one deque. Any thread may post. No
lock is held in Python code, so a signal handler may interrupt `wait` anywhere.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")
"""What is posted: events, or what an inbox turns into events."""

_MAX_WAIT_S = 1e6
"""A lock can't be waited for much longer. A caller that waits longer calls again."""


class ThreadInbox(Generic[Item]):
    """One end of a mailbox. One thread at a time uses it."""

    def __init__(self, events: deque[Item]) -> None:
        """Return these events, in the order in which they were posted."""
        self.interrupt: Exception | None = None
        self.is_taking_in = False
        self.num_moves = 0
        """How often `wait` has begun or ended to block: odd while it blocks. Other threads may read it."""
        self._events = events
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Rung for new events and by `wake`. It is apart from the events because an interrupt may lose a ring."""
        self._is_woken = False
        self._gate = threading.Lock()
        """Locked until `wait` blocks for the first time."""
        self._gate.acquire()

    def ring(self) -> None:
        """Let `wait` look for events. Any thread calls it, after it has added them."""
        if self._bell.empty():
            self._bell.put(None)

    def wait(self, timeout_s: float | None = None) -> list[Item]:
        """Return what was posted; see `executors.base.Inbox.wait`."""
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_WAIT_S)
        while not self._events and not self._is_woken:
            if not self._await_ring(limit_s):
                break
        self._silence()
        self.is_taking_in = bool(self._events)
        events: list[Item] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _await_ring(self, limit_s: float | None) -> bool:
        """Block until the bell rings. Return False if it doesn't in time."""
        self.num_moves += 1
        if self.num_moves == 1:
            self._gate.release()
        try:
            self._bell.get(timeout=limit_s)
        except queue.Empty:
            return False
        finally:
            self.num_moves += 1
        return True

    def await_first_block(self, limit_s: float) -> None:
        """Return once `wait` has blocked for the first time, or after `limit_s`. Any other thread calls it."""
        if self._gate.acquire(timeout=limit_s):
            self._gate.release()

    def _silence(self) -> None:
        """Forget earlier rings. Their events are in the deque, where `wait` looks next, or were taken."""
        while not self._bell.empty():
            self._bell.get()

    def wake(self) -> None:
        """End the current `wait` and all later ones, until `sleep`. Thread-safe."""
        self._is_woken = True
        self.ring()

    def sleep(self) -> None:
        """Let `wait` block again."""
        self._is_woken = False


class Mailbox(Generic[Item]):
    """The events of all worker threads of a loader."""

    def __init__(self) -> None:
        self._events: deque[Item] = deque()
        self.of_loop: ThreadInbox[Item] = ThreadInbox(self._events)
        self.of_receiver: ThreadInbox[Item] = ThreadInbox(self._events)
        """For the thread that leads while the loop is busy."""

    def post(self, events: Iterable[Item]) -> None:
        """Add events. Any thread."""
        self._events.extend(events)
        self.of_loop.ring()
        self.of_receiver.ring()

    def clear(self) -> None:
        """Forget what nobody has taken."""
        self._events.clear()
