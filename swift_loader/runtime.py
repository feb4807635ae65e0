"""What the system does to a loader: forks, threads, and exceptions of signal handlers.

A fork has a copy of every object. It has none of the maker's threads, child processes and device contexts.

Python runs signal handlers on the main thread: where a call begins or has returned, and where a loop goes back. An
exception of a handler propagates through the code that it interrupted. "No handler runs between these" is said of
lines that only load and store.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from queue import Empty, SimpleQueue
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar, cast

from swift_loader.errors import NoProcessesLeft, SwiftLoaderError

# Forks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The process that made an object. By default this one."""

    pid: int = field(default_factory=os.getpid)

    def is_here(self, getpid: Callable[[], int] = os.getpid) -> bool:
        """Return whether this process is the owner.

        It reads no global of this module, so finalisers may call it while the interpreter exits.
        """
        return getpid() == self.pid

    def check(self) -> None:
        """Raise `SwiftLoaderError` if this process is a fork of the one that started the workers.

        Call it before taking any lock: a thread that doesn't exist in this process may have held the lock.
        """
        if os.getpid() != self.pid:
            raise SwiftLoaderError(
                f"the loader was started in process {self.pid}, and this process (pid {os.getpid()}) is a fork of it. "
                f"The workers and their batches belong to process {self.pid}, where the loader works as before. Make a "
                f"loader of its own in this process, after the fork"
            )


# Closing --------------------------------------------------------------------------------------------------------------

_Closed = TypeVar("_Closed", bound="Closing")


class Closing:
    """What `with` closes."""

    def close(self) -> None:
        """Let go of what it holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self: _Closed) -> _Closed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Threads --------------------------------------------------------------------------------------------------------------


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
        if error.__context__ is not None and is_interrupt(error.__context__):  # locks of `threading` raise another one
            raise error.__context__ from None
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


# Signal handlers ------------------------------------------------------------------------------------------------------


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised this error. Call it on the thread that caught the error.

    It looks in the traceback for the code of the installed handlers, and for what was called as one: a handler may
    uninstall itself. One written in C has neither, so its errors count as errors of the interrupted code.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in SIGNALS} - {None}
    # Until Python 3.13, a frame keeps the locals that somebody looked at. The error is one of them in our frames.
    traced = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    frames = (frame for frame in traced if not str(frame.f_globals.get("__name__")).startswith("swift_loader."))
    return any(frame.f_code in handlers or _got_signal(frame) for frame in frames)


def raise_interrupt(error: BaseException) -> None:
    """Raise the exception of a signal handler, if that is the cause of this error."""
    if error.__cause__ is not None and is_interrupt(error.__cause__):
        raise error.__cause__ from None


def _got_signal(frame: FrameType) -> bool:
    """Return whether a function was called with a number and the frame that it interrupted, which seems to call it."""
    names, rest, _, values = inspect.getargvalues(frame)
    given = [*map(values.get, names), *(values.get(rest or "") or ())]
    return any(type(one) is int and other is frame.f_back is not None for one, other in pairwise(given))


SIGNALS = frozenset(signal.valid_signals())
"""Making this set takes longer than to ask for the handlers of all."""


@contextmanager
def blocked(signals: Collection[int]) -> Iterator[None]:
    """Block signals on this thread meanwhile. A handler may raise as they are blocked, and as they are let through."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def handled_signals() -> tuple[int, ...]:
    """Return the signals that the program handles, and so survives. Any thread."""
    others = {signal.SIGINT, getattr(signal, "SIGCHLD", None)}
    return tuple(number for number in SIGNALS - others if callable(signal.getsignal(number)))


def run_finalizer(finalizer: weakref.finalize[..., Any]) -> None:
    """Run a finaliser whose function is idempotent. If an interrupt ends it, run the function again, and raise.

    A finaliser runs once only, and the interrupt may have come before its function did anything.
    """
    pending = finalizer.peek()
    try:
        finalizer()
    except BaseException:
        if pending is not None:
            _, function, arguments, keywords = pending
            function(*arguments, **(keywords or {}))
        raise


def _code_of(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    for candidate in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004 - this isn't a test for callable
        code = getattr(candidate, "__code__", None)  # a bound method has the code of its function
        if isinstance(code, CodeType):
            return code
    return None
