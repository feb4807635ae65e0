"""A thread that waits for descriptors, and runs calls of other threads in between.

    OPEN ──stop──► STOPPING ──end──► STOPPED

The supervisor's processes are started on this thread, and live no longer than it does: the kernel kills them when it
ends. So it ends last.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import Enum
from typing import TypeVar

from swift_loader.errors import LoaderClosed, NoProcessesLeft
from swift_loader.executors.process.forks import FORKS
from swift_loader.threads import LoaderThread, nothing
from swift_loader.transport.descriptors import new_eventfd

# Stops processes in three stages, each with a time limit: wait for them to exit, then SIGTERM, then SIGKILL.
#
# Signals go through pidfds. So they can't hit another process that was given the pid of one that ended.

_STAGES: tuple[tuple[signal.Signals | None, float], ...] = ((None, 0.7), (signal.SIGTERM, 0.5), (signal.SIGKILL, 1.0))
"""(signal, seconds until the next stage). The first stage sends nothing: the processes were already told to exit."""


def stop_processes(pidfds: Iterable[int]) -> None:
    """Stop the processes, whose channels were closed before. Returns when all have ended, or after 2.2 s."""
    remaining = set(pidfds)
    for number, limit_s in _STAGES:
        if number is not None:
            for pidfd in remaining:
                _send(pidfd, number)
        remaining = _wait(remaining, limit_s)
        if not remaining:
            return


def _wait(pidfds: set[int], limit_s: float) -> set[int]:
    """Return the processes that didn't end within the limit."""
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    remaining = set(pidfds)
    while remaining and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            remaining.discard(pidfd)
    return remaining


def _send(pidfd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:  # it ended meanwhile
        return


# An event loop for one thread: waits for descriptors and calls a function when one is readable.
#
# Any other thread can wake it with `wake`.


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
            self._sources = {}
            wake, self._wake = self._wake, -1  # before it is closed, see `Holder`
            os.close(wake)

    def _read_wake(self) -> None:
        os.eventfd_read(self._wake)


JOIN_LIMIT_S = 2.0

Result = TypeVar("Result")


class Stopped(Exception):
    """The thread is being stopped, so what it waits for won't come."""


class _State(Enum):
    OPEN = "open"
    STOPPING = "stopping"
    """No new process starts. The existing ones are being stopped."""
    STOPPED = "stopped"


class EventLoopThread:
    """Runs calls one after another. The thread starts with the first call."""

    def __init__(
        self,
        look_after: Callable[[], float | None],
        on_failure: Callable[[BaseException], None],
        name: str = "supervisor",
    ) -> None:
        """Make the thread, without starting it.

        It calls `look_after` before each wait, which takes at most as many seconds as that returns. It calls
        `on_failure` with an error that ended its work.
        """
        self.loop = EventLoop()
        """Only the thread uses it, except for `wake`."""
        self.lock = threading.RLock()
        """Held while a process starts, so that none is started after `stop`.

        Also guards each write of `_state` and `_thread`, and each append to `_calls`. They are read without it: the
        state only moves forward, and each move wakes the thread. Only the thread takes out of `_calls`.
        """
        self._state = _State.OPEN
        self._calls: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._name = name
        self._look_after = look_after
        self._on_failure = on_failure
        self._failure: BaseException | None = None
        """The error that ended the thread's work. Written once, by the thread, which raises it in all later calls."""

    # Any thread -------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it takes calls."""
        return self._state is _State.OPEN and self._failure is None

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function on the thread. The future holds its result.

        Raises `LoaderClosed` if the thread is being stopped, or the error that ended its work.
        """
        answer: Future[Result] = Future()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(LoaderClosed("the loader was closed") if isinstance(error, Stopped) else error)

        if self._failure is not None:
            raise self._failure
        if not self.submit(run):
            raise LoaderClosed("the loader was closed; make a new one")
        return answer

    def submit(self, function: Callable[[], None]) -> bool:
        """Queue a call whose result nobody needs. Return False if the thread is being stopped."""
        with self.lock:
            if self._state is not _State.OPEN:
                return False
            if self._thread is None:
                self._thread = LoaderThread(self._run, self._name)
                try:
                    self._thread.start()
                except NoProcessesLeft:
                    self._thread = None
                    raise
            self._calls.append(function)
        self.loop.wake()
        return True

    def stop(self) -> None:
        """Take no more calls, and wait for none. The caller holds the lock."""
        if self._state is _State.OPEN:
            self._state = _State.STOPPING
        self.loop.wake()

    def end(self) -> None:
        """End the thread. The processes must have ended."""
        with self.lock:
            self._state = _State.STOPPED
        self.loop.wake()
        if self._thread is not None:
            # With a limit: if a signal handler closes the loader, its thread may hold a lock that this one waits for.
            self._thread.join(JOIN_LIMIT_S)
        self._look_after = self._on_failure = nothing

    # The thread -------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `Stopped` if the thread is being stopped."""
        if self._state is not _State.OPEN:
            raise Stopped

    def run_until(self, is_done: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Process events until `is_done()` is true. Return False if that takes longer than `limit_s`.

        Raises `Stopped` if the thread is being stopped.
        """
        done_in_time = self.loop.run_until(lambda: is_done() or self._state is not _State.OPEN, limit_s)
        self.check_open()
        return done_in_time

    def _run(self) -> None:
        try:
            while self._state is _State.OPEN:
                self._run_calls()
                limit_s = self._look_after()
                if not self._calls:  # some may have arrived meanwhile
                    self.loop.run_once(limit_s)
        except Stopped:
            pass
        except BaseException as error:
            self._failure = error
            self._on_failure(error)
            self._give_up_calls()
        while self._state is not _State.STOPPED:
            self.loop.run_once()
            if self._failure is not None:
                self._give_up_calls()
        self._give_up_calls()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _give_up_calls(self) -> None:
        """Run the calls, so that the threads that wait for them get an error. The others may raise `Stopped`."""
        while self._calls:
            with contextlib.suppress(Stopped):
                self._calls.popleft()()

    def __repr__(self) -> str:
        return f"<EventLoopThread {self._state.value}, {len(self._calls)} calls>"
