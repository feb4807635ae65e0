"""A bounded hand-over of things from one thread to another.

    giver ──put──► items ──take──► taker            put waits while it is full, take while it is empty
          ◄─────── room ◄─────────

It holds no lock in Python code. `end` and `close` end every wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class _End(Enum):
    END = "nothing more comes"


class Relay(Generic[Thing]):
    """Things that were given and not taken yet. One thread gives, one takes; any thread may close."""

    def __init__(
        self,
        max_things: int,
        *,
        timeout_s: float | None = None,
        on_timeout: Callable[[], BaseException] = TimeoutError,
        on_take: Callable[[], None] | None = None,
    ) -> None:
        """Begin empty. `max_things`: how many may wait to be taken.

        `timeout_s`: how long the taker waits for one; None: no limit. `on_timeout` returns the error after such a wait.
        `on_take` is called after each take of an iteration, on the taker's thread.
        """
        self.max_things = max_things
        self._things: queue.SimpleQueue[Thing | _End] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        """An entry for each thing that may be added."""
        for _ in range(max_things):
            self._room.put(None)
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._on_take = on_take
        self._closed = threading.Event()
        self.is_over = False
        """Whether nothing more will be added."""
        self.busy_s: float | None = None
        """How long the giver was at the things, if it says so."""
        self.error: BaseException | None = None
        """Why nothing more is added, if that isn't the regular end."""

    def put(self, thing: Thing) -> bool:
        """Add a thing. Blocks while there is no room. Return False if nobody wants it any more."""
        self._room.get()
        if self._closed.is_set():
            self._room.put(None)  # for the next call
            return False
        self._things.put(thing)
        return True

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more comes. The taker gets this error after all things."""
        self.error = error
        self.is_over = True
        self._things.put(_End.END)

    def poll(self) -> Thing | None:
        """Return the next thing, or None if there is none now."""
        try:
            thing = self._things.get_nowait()
        except queue.Empty:
            return None
        if isinstance(thing, _End):
            self._things.put(thing)
            return None
        self._room.put(None)
        return thing

    def __iter__(self) -> Iterator[Thing]:
        """Take all things. Blocks while there is none.

        Raises the giver's error, or that of a wait that took too long.
        """
        things, room = self._things, self._room
        while True:
            try:
                thing = things.get(timeout=self._timeout_s)
            except queue.Empty:
                raise self._on_timeout() from None
            if isinstance(thing, _End):
                things.put(thing)
                if self.error is not None:
                    raise self.error
                return
            room.put(None)
            if self._on_take is not None:
                self._on_take()
            yield thing
            del thing

    def close(self) -> None:
        """Let nobody wait any more. Idempotent."""
        self._closed.set()
        self._room.put(None)
        self._things.put(_End.END)
