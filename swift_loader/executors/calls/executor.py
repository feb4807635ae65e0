"""Calls functions: carries out what the scheduler decides, and reports what happens.

    loop's thread, or the receiver thread    ThreadInbox.wait; carry_out, under the dispatcher's dispatch lock
    the crew's threads                       the user's function

A call that takes longer than the timeout ends the loop's wait with an error, or it is left out: a coroutine is
cancelled, and another thread takes the place of a thread, which can't be killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from swift_loader.errors import WorkerStalled
from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.calls import Post
from swift_loader.executors.calls.event_loop import CoroutineCrew
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.thread.inbox import Mailbox
from swift_loader.executors.thread.task_thread import TaskThread
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.messages import (
    Answered,
    Death,
    Disconnected,
    Ended,
    Event,
    ExecutorFailed,
    Kill,
    Ready,
    Reap,
    Send,
    Stall,
    Start,
    TemplateLost,
    WorkerLost,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.work import Work

# Worker threads that do tasks. Each has a queue of its own.

Job = Callable[[Send, Post], None]
"""Does a task, and posts the event that answers it. It catches all that the user's code raises."""


class ThreadCrew:
    """Threads that do one task at a time each."""

    aftermath = ". A call can't be killed, so its thread stays until the function returns"
    """What becomes of a call that takes too long."""

    def __init__(self, job: Job, name: str) -> None:
        """Make a crew of no threads. `job` runs in all of them at the same time. `name`: what they are for."""
        self._job = job
        self._name = name
        self._post: Post = print  # until `start`
        self._threads: dict[int, TaskThread[Send]] = {}
        """By the worker's serial number."""
        self._is_stopped = False

    def start(self, post: Post) -> None:
        """Remember where events go."""
        self._post = post

    def add(self, worker: int) -> None:
        """Start another thread."""
        thread = self._threads[worker] = TaskThread(self._serve, f"{self._name}-{worker}")
        thread.start()
        if self._is_stopped:  # `stop` may not have seen it
            thread.stop()

    def give_up(self, worker: int, then: Callable[[], None]) -> None:
        """Let a thread end after its current call, and wait for it no more. Calls `then`."""
        if (thread := self._threads.pop(worker, None)) is not None:  # an interrupt may repeat this
            thread.stop()
        then()

    def send(self, task: Send) -> None:
        """Have a thread do a task after those that it has."""
        self._threads[task.worker].send(task)

    def stack(self, worker: int) -> str:
        """Return the thread's Python stack."""
        return self._threads[worker].stack() if worker in self._threads else ""

    def stop(self) -> None:
        """Let the threads end after their current tasks."""
        self._is_stopped = True
        for thread in list(self._threads.values()):
            thread.stop()

    def join(self, limit_s: float) -> None:
        """Wait for the threads. One that hangs in the user's code is left alone."""
        deadline_s = time.monotonic() + limit_s
        for thread in list(self._threads.values()):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _serve(self, tasks: Iterator[Send]) -> None:
        job, post = self._job, self._post
        for task in tasks:
            job(task, post)


JOIN_LIMIT_S = 1.5
"""How long `close` waits for calls to return. Those that hang are left alone."""


class CallExecutor:
    """The workers of one stage."""

    grace_s = 0.0
    """A replacement starts at once."""
    largest_batch_nbytes = 0
    """What is handed over lies in no slot."""

    def __init__(
        self,
        crew: ThreadCrew | CoroutineCrew,
        num_workers: int,
        name: str,
        settings: PlanSettings,
        describe: Callable[[Work], str],
        *,
        leaves_stalled_out: bool,
    ) -> None:
        """Make an executor that isn't started.

        `num_workers`: tasks that the crew does at the same time. `name`: of the stage, for errors. `settings`: of a
        plan without samples. `describe` returns which item a work is, for errors. `leaves_stalled_out`: as in
        `SchedulerSettings`.
        """
        self.owner = ProcessOwner()
        """A fork of it has none of the threads."""
        self.plan = Plan.of(0, settings)
        self._mailbox = Mailbox[Event]()
        self.inboxes: Sequence[Inbox] = [self._mailbox.of_loop, self._mailbox.of_receiver]
        """One thread takes over while the loop is busy, and sends the next tasks."""
        self._crew = crew
        self._num_workers = num_workers
        self._name = name
        self._describe = describe
        self._leaves_stalled_out = leaves_stalled_out
        self._ids: list[int] = []
        """The id of each worker, by its serial number."""
        self._stalls: dict[int, WorkerStalled] = {}
        """The errors of the workers that were killed, by serial number."""
        self._gone: set[int] = set()
        """Those of them that are given up."""
        self._lock = threading.Lock()
        """Guards what is posted of calls: nothing more may come of one that was given up."""

    def start(self) -> None:
        """Start the crew."""
        self._crew.start(self._post)
        for worker_id in range(self._num_workers):
            self._begin(worker_id)

    def _begin(self, worker_id: int) -> None:
        serial = len(self._ids)
        self._ids.append(worker_id)
        self._crew.add(serial)
        self._mailbox.post([Ready(serial, worker_id)])

    def _post(self, events: Iterable[Event]) -> None:
        """Take the events of a call. Any thread."""
        with self._lock:
            self._mailbox.post(
                event for event in events if not (isinstance(event, Answered) and event.worker in self._gone)
            )

    def _let_go(self, worker: int) -> None:
        with self._lock:
            if worker not in self._gone:
                self._gone.add(worker)
                self._mailbox.post([Disconnected(worker, self._ids[worker])])

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Do nothing: a function depends on no plan."""

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002
        """Raise: the crew is fixed."""
        raise RuntimeError(f"stage {self._name!r} has {self._num_workers} workers, and can't have {num_workers}")

    def carry_out(self, action: ToDo) -> list[Any]:
        """Send a task. Give a worker up whose call takes too long, or end the run."""
        if isinstance(action, Send):
            self._crew.send(action)
        elif isinstance(action, Kill):
            error = self._stalls[action.worker] = action.stall.error = self._stalled(action.stall)
            if self._leaves_stalled_out:
                self._crew.give_up(action.worker, partial(self._let_go, action.worker))
            else:
                self._mailbox.post([ExecutorFailed(error)])
        elif isinstance(action, Reap):
            is_gone = action.worker in self._gone  # else a coroutine blocks its loop
            self._mailbox.post(
                [Ended(action.worker, Death()) if is_gone else ExecutorFailed(self._stalls[action.worker])]
            )
        elif isinstance(action, Start):
            self._begin(action.worker_id)
        return []

    def _stalled(self, stall: Stall) -> WorkerStalled:
        stack = "" if stall.worker is None else self._crew.stack(stall.worker)
        item = "" if stall.work is None else f", {self._describe(stall.work)},"
        return WorkerStalled(
            f"stage {self._name!r}{item} has taken {stall.busy_s:.1f} s, longer than its timeout{self._crew.aftermath}"
            f"{attached(traces=stack)}"
        )

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        if isinstance(cause, Stall):
            return self._stalled(cause)
        assert isinstance(cause, BaseException), f"a call is never lost: {cause}"
        return cause

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        assert isinstance(about, Stall), f"a call is never lost: {about}"
        return str(self._stalled(about))

    def stop(self) -> None:
        """Begin no more calls, and wake whoever waits in the inbox. Any thread. Idempotent."""
        self._crew.stop()
        self._mailbox.of_loop.wake()

    def close(self) -> list[Any]:
        """Wait for the crew, at most `JOIN_LIMIT_S`. Idempotent."""
        self._crew.join(JOIN_LIMIT_S)
        return []

    def __repr__(self) -> str:
        return f"<CallExecutor {self._name!r}>"
