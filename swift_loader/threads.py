"""The loader's threads, what they answer to others, and why a thread or process can't be started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

from swift_loader.errors import NoProcessesLeft


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


Result = TypeVar("Result")


class Answer(Generic[Result]):
    """What another thread returns or raises, or that something has ended.

    It has no lock in Python code, as a future and an event have: a signal handler that raises on the thread that waits
    would leave it taken, and the other thread would block.
    """

    def __init__(self) -> None:
        self._given: tuple[Result | None, BaseException | None] | None = None
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Has an entry once the answer is there."""

    def give(self, result: Result | None, error: BaseException | None = None) -> None:
        """Give it. Once, on one thread."""
        self._given = result, error
        self._bell.put(None)

    @property
    def is_given(self) -> bool:
        """Whether it is there."""
        return self._given is not None

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until it is there, at most `limit_s`. Return whether it is."""
        try:
            with suppress(Empty):
                if self._given is None:
                    self._bell.get(timeout=limit_s)
        finally:
            if self._given is not None and self._bell.empty():
                self._bell.put(None)  # for other threads
        return self._given is not None

    def result(self) -> Result:
        """Wait for it. Return the result, or raise the error."""
        self.wait()
        assert self._given is not None
        result, error = self._given
        if error is not None:
            raise error
        return cast(Result, result)


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
