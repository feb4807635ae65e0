"""Lets one thread at a time take a batch from a loader."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from swift_loader.process_owner import ProcessOwner


class NextLock:
    """One turn after the other, each for one `next`. A turn belongs to the thread that holds `lock()`."""

    def __init__(self) -> None:
        # Reentrant: a signal handler that calls next() while its own thread is in next() gets an error, not a deadlock.
        self._lock = threading.RLock()
        self.taker: object | None = None
        """The iterator whose turn it is; None between two turns. Only the thread that holds the lock sets it."""
        self._process = ProcessOwner()

    def lock(self) -> AbstractContextManager[object]:
        """Return the lock that a thread holds during its turn."""
        if not self._process.is_here():  # a fork: the thread that may hold the lock doesn't exist here
            self._lock, self.taker, self._process = threading.RLock(), None, ProcessOwner()
        return self._lock

    def check_free(self) -> None:
        """Raise `RuntimeError` if this thread, which holds the lock, is already within a turn."""
        if self.taker is not None:
            raise RuntimeError(
                "next() was called while this thread is already within next() of the same loader, by a signal handler "
                "or by code that builds or decodes a batch. Call next() in the training loop only"
            )
