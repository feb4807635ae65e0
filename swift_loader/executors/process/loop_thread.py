"""A thread that waits for descriptors, and runs calls of other threads in between.

    OPEN ──stop──► STOPPING ──end──► STOPPED

Processes that are started on this thread live no longer than it does: the kernel kills them when it ends. So it ends
last.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from swift_loader.errors import LoaderClosed
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.forks import FORKS
from swift_loader.runtime import Answer, LoaderThread, Result
from swift_loader.transport.channel import new_eventfd

JOIN_LIMIT_S = 1.0
"""How long to wait for the thread. If a signal handler closes the loader, its thread may hold a lock that this one
waits for."""


class Stopped(Exception):
    """The thread is being stopped, so what it waits for won't come."""


class _State(Enum):
    OPEN = "open"
    STOPPING = "stopping"
    """No new process starts. The existing ones are being stopped."""
    STOPPED = "stopped"


class LoopThread:
    """Waits in poll(2), takes in what comes from readable descriptors, and runs calls one after another.

    The thread starts with the first call.
    """

    def __init__(self, name: str) -> None:
        """Make the thread, without starting it."""
        self.lock = threading.RLock()
        """Held while a process starts, so that none is started after `stop`.

        Also guards each write of `_state` and `_thread`, and each append to `_calls`. They are read without it: the
        state only moves forward, and each move wakes the thread. Only the thread takes out of `_calls`.
        """
        self._name = name
        self._state = _State.OPEN
        self._calls: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        """The error that ended the thread's work. Written once, by the thread, which raises it in all later calls."""
        self._sources: dict[int, Any] = {}
        """Whose descriptors they are. Only the thread uses it, and `_poll`."""
        self._poll = select.poll()
        self._bell = new_eventfd()
        self._poll.register(self._bell, select.POLLIN)
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; some may be -1."""
        return [self._bell]

    def take_in(self, source: Any) -> None:
        """Take in what has come from a source that was given to `watch`. On the thread."""
        raise NotImplementedError

    def look_after(self) -> float | None:
        """Do what is to be done before each wait. Return in how many seconds again; None: when something happens."""
        return None

    def note_failure(self, error: BaseException) -> None:
        """Take in an error that has ended the thread's work. On the thread."""

    # Any thread -------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it takes calls."""
        return self._state is _State.OPEN and self._failure is None

    def call(self, function: Callable[[], Result]) -> Answer[Result]:
        """Call a function on the thread. Returns at once.

        Raises `LoaderClosed` if the thread is being stopped, or the error that ended its work.
        """
        answer = Answer[Result]()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                answer.give(function())
            except BaseException as error:
                answer.give(None, LoaderClosed("the loader was closed") if isinstance(error, Stopped) else error)

        if self._failure is not None:
            raise self._failure
        if not self.submit(run):
            raise LoaderClosed("the loader was closed; make a new one")
        return answer

    def submit(self, function: Callable[[], object]) -> bool:
        """Queue a call whose result nobody needs. Return False if the thread is being stopped."""
        with self.lock:
            if self._state is not _State.OPEN:
                return False
            if self._thread is None:
                self._thread = LoaderThread(self._run, self._name)
                try:
                    self._thread.start()
                except BaseException:
                    if not self._thread.is_alive():
                        self._thread = None  # if it starts after all, it ends at once
                    raise
            self._calls.append(function)
        self.wake()
        return True

    def wake(self) -> None:
        """Have the thread look whether what it waits for is there. Does nothing once closed."""
        if (bell := self._bell) >= 0:
            os.eventfd_write(bell, 1)

    def stop(self) -> None:
        """Take no more calls, and wait for none. The caller holds the lock."""
        if self._state is _State.OPEN:
            self._state = _State.STOPPING
        self.wake()

    def end(self) -> None:
        """End the thread, whose processes must have ended. Waits for `JOIN_LIMIT_S` at most."""
        with self.lock:
            self._state = _State.STOPPED
        self.wake()
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    @property
    def is_closed(self) -> bool:
        """Whether `close_loop` was called."""
        return self._bell < 0

    def close_loop(self) -> None:
        """Close the event descriptor. The thread must have ended. Idempotent."""
        if self._bell >= 0:
            self._sources = {}
            bell, self._bell = self._bell, -1  # before it is closed, see `Holder`
            os.close(bell)

    # The thread -------------------------------------------------------------------------------------------------------

    def watch(self, descriptor: int, source: Any) -> None:
        """Call `take_in(source)` whenever the descriptor is readable or at its end; forward the stderr of a process."""
        self._sources[descriptor] = source
        self._poll.register(descriptor, select.POLLIN)

    def unwatch(self, *descriptors: int) -> None:
        """Stop watching descriptors. Call it before they are closed. Idempotent."""
        for descriptor in descriptors:
            if self._sources.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)

    def check_open(self) -> None:
        """Raise `Stopped` if the thread is being stopped."""
        if self._state is not _State.OPEN:
            raise Stopped

    def rounds(self, limit_s: float | None = None) -> Iterator[None]:
        """Yield whenever what the caller waits for may be there, for `limit_s`. Processes events in between.

        Raises `Stopped` if the thread is being stopped.
        """
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        left_s = limit_s
        while left_s is None or left_s > 0:
            self.check_open()
            yield
            self._run_once(left_s)
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
        self._run_once(0)  # it may have arrived: this process may have been stopped meanwhile
        self.check_open()
        yield

    def _run_once(self, timeout_s: float | None = None) -> None:
        """Wait until a descriptor is readable, at most `timeout_s`, and take in what has come."""
        for descriptor, _ in self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000):
            if descriptor == self._bell:
                os.eventfd_read(descriptor)
            elif isinstance(source := self._sources.get(descriptor), Diagnostics):
                if not source.forward():
                    self.unwatch(descriptor)
            elif source is not None:
                self.take_in(source)

    def _run(self) -> None:
        with self.lock:
            if self._thread is not threading.current_thread():
                return
        try:
            while self._state is _State.OPEN:
                while self._calls:
                    self._calls.popleft()()
                limit_s = self.look_after()
                if not self._calls and self._state is _State.OPEN:  # else a call has taken in what was to wake this one
                    self._run_once(limit_s)
        except Stopped:
            pass
        except BaseException as error:
            self._failure = error
            self.note_failure(error)
            self._give_up_calls()
        while self._state is not _State.STOPPED:
            self._run_once()
            if self._failure is not None:
                self._give_up_calls()
        self._give_up_calls()

    def _give_up_calls(self) -> None:
        """Run the calls, so that the threads that wait for them get an error. The others may raise `Stopped`."""
        while self._calls:
            with contextlib.suppress(Stopped):
                self._calls.popleft()()
