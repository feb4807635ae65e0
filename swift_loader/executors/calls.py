"""Workers that call a function of the user's: threads, or coroutines on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from swift_loader.errors import NoProcessesLeft, WorkerStalled
from swift_loader.executors.crew import CrewExecutor, CrewWorker, WorkerThread
from swift_loader.executors.wording import attached
from swift_loader.runtime import LoaderThread, ProcessOwner
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.messages import Ready, Send, Stall
from swift_loader.scheduler.queues import Limits

END_LIMIT_S = 2.0
"""How long `close` waits for what coroutines have left."""


_NAME = "event-loop"


class CoroutineLoop:
    """An event loop that runs in a thread while somebody uses it.

    Between two uses there is no thread, but the loop stays: what a coroutine keeps, such as an HTTP session, belongs to
    its loop.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """What the next user gets."""
        self._thread: LoaderThread | None = None
        self._running: dict[asyncio.AbstractEventLoop, LoaderThread] = {}
        """The thread that runs each."""
        self._users: set[object] = set()
        """A set and no count, so that a user whose call was interrupted may repeat it."""
        self._maker = ProcessOwner()
        self._is_closed = False
        """Whether the last user frees the loop."""

    def enter(self, user: object) -> asyncio.AbstractEventLoop:
        """Use the loop. The first user starts the thread. Each calls `leave`. Idempotent."""
        with self._lock:
            self._users.add(user)
            if self._thread is None and self._loop in self._running:  # its thread, which was left, ends it
                self._loop = None
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            if self._thread is None:
                self._thread = thread = LoaderThread(self._run, _NAME, self._loop)
                self._running[self._loop] = thread
                try:
                    thread.start()
                except BaseException:
                    if not thread.is_alive():
                        self._thread = None
                        self._running.pop(self._loop, None)
                    raise
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            with self._lock:
                self._running.pop(loop, None)
                is_left = self._loop is not loop
            if is_left:
                _end(loop)

    def leave(self, user: object, limit_s: float) -> None:
        """Use the loop no more. The last user cancels what still runs, and waits for the thread, at most `limit_s`.

        Idempotent.
        """
        with self._lock:
            loop = self._loop
            if self._users == {user} and loop is not None and self._thread is not None:
                call_soon(loop, partial(_cancel_all, loop))
                self._thread = None
            self._users.discard(user)
            if self._users or loop is None:
                return
            thread = self._running.get(loop)
        if thread is not None:
            thread.join(limit_s)
        with self._lock:
            if self._users:  # another thread uses it again, or another one
                return
            if loop in self._running:  # a coroutine blocks it: its thread ends it then, and the next user gets another
                if self._loop is loop:
                    self._loop = None
            elif self._is_closed:
                self._free()

    def close(self) -> None:
        """Free the loop, once nobody uses it. Idempotent. It may be used again. Does nothing in a fork."""
        if not self._maker.is_here():
            return
        with self._lock:
            self._is_closed = True
            self._free()

    def _free(self) -> None:
        if self._users or self._loop is None:
            return
        if self._loop not in self._running:  # else its thread ends it
            # In a thread of its own: the caller's may run another loop.
            thread = LoaderThread(_end, _NAME, self._loop)
            try:
                thread.start()
                thread.join(END_LIMIT_S)
            except NoProcessesLeft:  # while Python 3.12 ends, it starts no thread
                self._loop.close()
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


Job = Callable[[Send, CrewWorker], Awaitable[None] | None]
"""Does a task of a worker, which posts the event that answers it. It catches all that the user's code raises. All
workers run it at the same time."""


class CallThread(WorkerThread):
    """A thread that does one task at a time."""

    def serve(self) -> None:
        """Do the tasks until None comes."""
        self.post([Ready(self.serial, self.worker_id)])
        for task in iter(self.tasks.get, None):
            self.executor.job(task, self)


class CallCoroutine(CrewWorker):
    """A coroutine for each task, one at a time."""

    def __init__(self, executor: Any, serial: int, worker_id: int) -> None:
        """Begin nothing. The loop runs in another thread; whoever has it waits for the coroutines."""
        super().__init__(executor, serial, worker_id)
        self._loop: asyncio.AbstractEventLoop = executor.loop
        self._waiting: deque[Send] = deque()
        """The tasks after the one that it does. Only the loop's thread uses it."""
        self._running: asyncio.Task[None] | None = None
        """Written by the loop's thread."""
        self._is_stopped = False

    def start(self) -> None:
        """Get ready for tasks."""
        self.post([Ready(self.serial, self.worker_id)])

    def send(self, task: Send) -> None:
        """Have it do a task after those that it has."""
        call_soon(self._loop, partial(self._take, task))

    def give_up(self) -> None:
        """Cancel what it does, and `let_go`: on the loop, which a coroutine may block."""
        call_soon(self._loop, self._cancel_and_let_go)

    def stop(self) -> None:
        """Begin no more tasks, and cancel the one that runs."""
        if not self._is_stopped:
            self._is_stopped = True
            call_soon(self._loop, self._cancel)

    def stack(self) -> str:
        """Return where the coroutine is suspended."""
        running, places = self._running, list[str]()
        awaited: Any = None if running is None else running.get_coro()
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            places.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
            awaited = awaited.cr_await
        return "\n".join(places[2:])  # from the user's code on

    def _cancel(self) -> None:
        self._waiting.clear()
        if self._running is not None:
            self._running.cancel()

    def _cancel_and_let_go(self) -> None:
        self._cancel()
        self.let_go()

    def _take(self, task: Send) -> None:
        if self._running is not None:
            self._waiting.append(task)
        elif not self._is_stopped:
            self._running = asyncio.ensure_future(self._run(task))

    async def _run(self, task: Send) -> None:
        try:
            while not self._is_stopped:
                await self.executor.job(task, self)
                if not self._waiting:
                    break
                task = self._waiting.popleft()
        finally:
            self._running = None


class CallExecutor(CrewExecutor[CrewWorker]):
    """The workers of one stage."""

    def __init__(
        self,
        job: Job,
        loop: asyncio.AbstractEventLoop | None,
        num_workers: int,
        name: str,
        settings: PlanSettings,
        *,
        leaves_stalled_out: bool,
    ) -> None:
        """Make an executor that isn't started.

        `loop`: where the job, which is asynchronous, runs; None: in threads. `name`: of the stage, for errors.
        `settings`: of a plan without samples.
        """
        super().__init__(name, leaves_stalled_out=leaves_stalled_out)
        self.plan = Plan.of(0, settings)
        self.job = job
        self.loop = loop
        self._num_workers = num_workers

    def start(self) -> None:
        """Start the workers."""
        self._open(self._num_workers)

    def _make(self, serial: int, worker_id: int) -> CrewWorker:
        return (CallThread if self.loop is None else CallCoroutine)(self, serial, worker_id)

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Do nothing: a function depends on no plan."""

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002
        """Raise: their number is fixed."""
        raise RuntimeError(f"stage {self.name!r} has {self._num_workers} workers, and can't have {num_workers}")

    def _stalled(self, stall: Stall) -> WorkerStalled:
        worker = self._workers.get(-1 if stall.worker is None else stall.worker)
        work: Any = stall.work
        item = "" if work is None else f", item {work.number},"
        stays = (
            "" if self.loop is not None else ". A call can't be killed, so its thread stays until the function returns"
        )
        return WorkerStalled(
            f"stage {self.name!r}{item} has taken {stall.busy_s:.1f} s, longer than its timeout{stays}"
            f"{attached(traces='' if worker is None else worker.stack())}"
        )
