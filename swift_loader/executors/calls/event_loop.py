"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from enum import Enum

from swift_loader.process_owner import ProcessOwner
from swift_loader.threads import LoaderThread

END_LIMIT_S = 2.0
"""How long `close` waits for what coroutines have left."""


_NAME = "event-loop"


class _LoopState(Enum):
    """RUNNING ─run─► ENDED, or RUNNING ─join─► LEFT ─run─► ENDED."""

    RUNNING = "running"
    LEFT = "left"
    """Nobody waits for it any more, so it closes the loop."""
    ENDED = "ended"


class _LoopThread:
    """Runs an event loop until that is stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread."""
        self._loop = loop
        self._lock = threading.Lock()
        self._state = _LoopState.RUNNING
        self._thread = LoaderThread(self._run, _NAME)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            with self._lock:
                is_left, self._state = self._state is _LoopState.LEFT, _LoopState.ENDED
            if is_left:
                _end(self._loop)

    def join(self, limit_s: float) -> bool:
        """Wait until the thread has ended. If that takes longer than `limit_s`, leave the loop to it. Return which."""
        self._thread.join(limit_s)
        with self._lock:
            if self._state is _LoopState.RUNNING:
                self._state = _LoopState.LEFT
            return self._state is _LoopState.ENDED


class _Owner(Enum):
    HERE = "here"
    GONE = "gone"
    """The last user frees the loop."""


class CoroutineLoop:
    """An event loop that runs in a thread while somebody uses it.

    Between two uses there is no thread, but the loop stays: what a coroutine keeps, such as an HTTP session, belongs to
    its loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: _LoopThread | None = None
        self._num_users = 0
        self._maker = ProcessOwner()
        self._owner = _Owner.HERE

    def enter(self) -> asyncio.AbstractEventLoop:
        """Use the loop. The first user starts the thread. Each calls `leave` once."""
        with self._lock:
            self._num_users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            if self._thread is None:
                self._thread = _LoopThread(self._loop)
            return self._loop

    def leave(self, limit_s: float) -> None:
        """Use the loop no more. The last user cancels what still runs, and waits for the thread, at most `limit_s`."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            loop, thread, self._thread = self._loop, self._thread, None
        assert loop is not None
        assert thread is not None
        call_soon(loop, lambda: _cancel_all(loop))
        has_ended = thread.join(limit_s)
        with self._lock:
            if not has_ended:  # a coroutine blocks it: the next user gets another one
                self._loop = None
            elif self._owner is _Owner.GONE:
                self._free()

    def close(self) -> None:
        """Free the loop, once nobody uses it. Idempotent. It may be used again. Does nothing in a fork."""
        if not self._maker.is_here():
            return
        with self._lock:
            self._owner = _Owner.GONE
            self._free()

    def _free(self) -> None:
        if not self._num_users and self._loop is not None:
            # In a thread of its own: the caller's may run another loop.
            thread = LoaderThread(_end, _NAME, self._loop)
            thread.start()
            thread.join(END_LIMIT_S)
            self._loop = None


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Close what coroutines have left, then the loop."""
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks, and stop the loop once they have ended."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    gathering = asyncio.gather(*tasks, return_exceptions=True)
    gathering.add_done_callback(lambda _: loop.stop())


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Have a loop call a function, unless it was closed. Any thread."""
    with contextlib.suppress(RuntimeError):  # it was closed, so nobody waits
        loop.call_soon_threadsafe(function)
