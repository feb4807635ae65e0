"""An event loop in a thread of its own, and workers that are coroutines on it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

from swift_loader.executors.calls import Post
from swift_loader.process_owner import ProcessOwner
from swift_loader.scheduler.messages import Send
from swift_loader.threads import LoaderThread

AsyncJob = Callable[[Send, Post], Awaitable[None]]
"""As `threads.Job`."""


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


class CoroutineCrew:
    """Workers that do one task at a time each, all on one event loop."""

    aftermath = ""
    """As in `ThreadCrew`: it is cancelled."""

    def __init__(self, job: AsyncJob, loop: asyncio.AbstractEventLoop) -> None:
        """Make the workers. `job` runs for all of them at the same time, on `loop`, which runs in another thread."""
        self._job = job
        self._loop = loop
        self._waiting = defaultdict[int, deque[Send]](deque)
        """Of each worker: the tasks after the one that it does. Only the loop's thread uses it."""
        self._running: dict[int, asyncio.Task[None]] = {}
        """By worker. Only the loop's thread uses it."""
        self._stopping = threading.Event()
        self._post: Post = print  # until `start`

    def start(self, post: Post) -> None:
        """Remember where events go."""
        self._post = post

    def add(self, worker: int) -> None:
        """Do nothing: a worker begins with its first task."""

    def give_up(self, worker: int, then: Callable[[], None]) -> None:
        """Cancel what a worker does. Calls `then` on the loop, which a coroutine may block."""

        def cancel() -> None:
            self._waiting[worker].clear()
            if worker in self._running:
                self._running[worker].cancel()
            then()

        call_soon(self._loop, cancel)

    def send(self, task: Send) -> None:
        """Have a worker do a task after those that it has."""
        call_soon(self._loop, lambda: self._take(task))

    def stack(self, worker: int) -> str:
        """Return where a coroutine is suspended."""
        task, places = self._running.get(worker), list[str]()
        awaited: Any = None if task is None else task.get_coro()
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            places.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
            awaited = awaited.cr_await
        return "\n".join(places[2:])  # from the user's code on

    def stop(self) -> None:
        """Begin no more tasks, and cancel those that run."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        call_soon(self._loop, self._cancel)

    def join(self, limit_s: float) -> None:
        """Do nothing: the loop's owner waits for it."""

    def _cancel(self) -> None:
        for task in self._running.values():
            task.cancel()

    def _take(self, task: Send) -> None:
        if task.worker in self._running:
            self._waiting[task.worker].append(task)
        elif not self._stopping.is_set():
            self._running[task.worker] = asyncio.ensure_future(self._run(task))

    async def _run(self, task: Send) -> None:
        waiting = self._waiting[task.worker]
        try:
            while not self._stopping.is_set():
                await self._job(task, self._post)
                if not waiting:
                    break
                task = waiting.popleft()
        finally:
            del self._running[task.worker]
