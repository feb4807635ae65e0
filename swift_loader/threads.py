"""The loader's threads, and why a thread or process can't be started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from swift_loader.errors import NoProcessesLeft
from swift_loader.process_owner import ProcessOwner

# Lets one thread at a time take a batch from a loader.


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


class LoaderThread(threading.Thread):
    """A daemon thread for which anybody may wait at any time."""

    def __init__(self, run: Callable[..., object], name: str, *arguments: Any) -> None:
        """Make a thread that isn't started. It calls `run` with the arguments."""
        super().__init__(target=run, name=f"swift_loader-{name}", args=arguments, daemon=True)

    def start(self) -> None:
        """Start it. Raises `NoProcessesLeft`."""
        with explaining_starts("a thread"):
            super().start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds. Does nothing on the thread itself, or if it doesn't run.

        An interrupt of `start` may leave a thread that doesn't run yet.
        """
        if self.is_alive() and self is not threading.current_thread():
            super().join(timeout)


@contextmanager
def explaining_starts(what: str) -> Iterator[None]:
    """Raise `NoProcessesLeft`, which names the limits, if the block fails because the system starts no more."""
    try:
        yield
    except (RuntimeError, BlockingIOError) as error:  # Python's for threads, and for processes
        raise NoProcessesLeft(f"can't start {what}: {error}. {limits_of_processes()}") from error


def limits_of_processes() -> str:
    """Return what limits the number of processes and threads, and what to do."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        limit = "none"
    else:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    return (
        f"The system limits a user's processes and threads (RLIMIT_NPROC, `ulimit -u`, here {limit}), those of a "
        f"container (pids.max) and memory. Raise what is used up, or use fewer workers"
    )


def nothing(*_: object) -> None:
    """Do nothing, in place of a method that a closed object no longer calls.

    A cycle of references would keep the dataset and the memory of batches until the garbage collector runs.
    """
