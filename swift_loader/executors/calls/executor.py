"""Workers that call a function of the user's: threads, or coroutines on an event loop of this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from swift_loader.errors import WorkerStalled
from swift_loader.executors.calls.event_loop import call_soon
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.thread.crew import CrewExecutor, CrewWorker, Post, WorkerThread
from swift_loader.executors.thread.inbox import Mailbox
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.messages import Event, Ready, Send, Stall
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.work import Work

Job = Callable[[Send, Post], Awaitable[None] | None]
"""Does a task, and posts the event that answers it. It catches all that the user's code raises. All workers run it at
the same time."""


class CallThread(WorkerThread):
    """A thread that does one task at a time."""

    def __init__(self, serial: int, worker_id: int, mailbox: Mailbox[Event], name: str, job: Job) -> None:
        super().__init__(serial, worker_id, mailbox, f"{name}-{serial}")
        self._job = job

    def serve(self) -> None:
        """Do the tasks until None comes."""
        job, post = self._job, self.post
        for task in iter(self.tasks.get, None):
            job(task, post)


class CallCoroutine(CrewWorker):
    """A coroutine for each task, one at a time."""

    def __init__(
        self, serial: int, worker_id: int, mailbox: Mailbox[Event], loop: asyncio.AbstractEventLoop, job: Job
    ) -> None:
        """Begin nothing. The loop runs in another thread; whoever has it waits for the coroutines."""
        super().__init__(serial, worker_id, mailbox)
        self._job: Any = job
        self._loop = loop
        self._waiting: deque[Send] = deque()
        """The tasks after the one that it does. Only the loop's thread uses it."""
        self._running: asyncio.Task[None] | None = None
        """Written by the loop's thread."""
        self._is_stopped = False

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
                await self._job(task, self.post)
                if not self._waiting:
                    break
                task = self._waiting.popleft()
        finally:
            self._running = None


class CallExecutor(CrewExecutor[CrewWorker]):
    """The workers of one stage."""

    largest_batch_nbytes = 0
    """What is handed over lies in no slot."""

    def __init__(
        self,
        job: Job,
        loop: asyncio.AbstractEventLoop | None,
        num_workers: int,
        name: str,
        settings: PlanSettings,
        describe: Callable[[Work], str],
        *,
        leaves_stalled_out: bool,
    ) -> None:
        """Make an executor that isn't started.

        `loop`: where the job, which is asynchronous, runs; None: in threads. `name`: of the stage, for errors.
        `settings`: of a plan without samples. `describe` returns which item a work is, for errors.
        """
        super().__init__(leaves_stalled_out=leaves_stalled_out)
        self.plan = Plan.of(0, settings)
        self._job = job
        self._loop = loop
        self._num_workers = num_workers
        self._name = name
        self._describe = describe

    def start(self) -> None:
        """Start the workers."""
        self._open(self._num_workers)

    def _make(self, serial: int, worker_id: int) -> CrewWorker:
        self.mailbox.post([Ready(serial, worker_id)])
        if self._loop is not None:
            return CallCoroutine(serial, worker_id, self.mailbox, self._loop, self._job)
        return CallThread(serial, worker_id, self.mailbox, self._name, self._job)

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Do nothing: a function depends on no plan."""

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002
        """Raise: their number is fixed."""
        raise RuntimeError(f"stage {self._name!r} has {self._num_workers} workers, and can't have {num_workers}")

    def _stalled(self, stall: Stall) -> WorkerStalled:
        worker = self._workers.get(-1 if stall.worker is None else stall.worker)
        item = "" if stall.work is None else f", {self._describe(stall.work)},"
        stays = (
            "" if self._loop is not None else ". A call can't be killed, so its thread stays until the function returns"
        )
        return WorkerStalled(
            f"stage {self._name!r}{item} has taken {stall.busy_s:.1f} s, longer than its timeout{stays}"
            f"{attached(traces='' if worker is None else worker.stack())}"
        )
