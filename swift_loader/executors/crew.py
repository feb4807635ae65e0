"""The executor of workers that are threads or coroutines of this process.

    loop's thread, or the receiver thread    ThreadInbox.wait; carry_out, under the engine's dispatch lock
    workers                                  a task of the scheduler's; its events come out of the inbox in use

Each worker does one task at a time, in the order sent. None can be killed. If it takes longer than the timeout, the
loop's wait ends with an error, or the worker is given up: another one takes its place, and nothing more comes of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

from swift_loader.errors import WorkerStalled
from swift_loader.executors.base import Executor, Inbox, ToDo
from swift_loader.runtime import Answer, LoaderThread, ProcessOwner
from swift_loader.scheduler import messages
from swift_loader.scheduler.messages import Event, Send, Stall
from swift_loader.worker.process import stack_of

# Events of the workers, on their way to whoever leads.
#
#     workers ──CrewExecutor.post──► deque ──ThreadInbox.wait──► the thread that leads
#
# The loop's thread and one other take turns to lead, so there are two inboxes over one deque. Any thread may post. No
# lock is held in Python code, so a signal handler may interrupt `wait` anywhere.

_MAX_WAIT_S = 1e6
"""A lock can't be waited for much longer. A caller that waits longer calls again."""


class ThreadInbox(Inbox):
    """The events of all workers. One thread at a time uses it."""

    def __init__(self, events: deque[Event]) -> None:
        """Return these events, in the order in which they were posted."""
        super().__init__()
        self.num_moves = 0
        """How often `wait` has begun or ended to block: odd while it blocks. Other threads may read it."""
        self._events = events
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Rung for new events and by `wake`. It is apart from the events because an interrupt may lose a ring."""
        self.first_block: Answer[None] = Answer()
        """Given once `wait` blocks for the first time. Other threads wait for it."""

    def ring(self) -> None:
        """Let `wait` look for events. Any thread calls it, after it has added them."""
        if self._bell.empty():
            self._bell.put(None)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what was posted; see `executors.base.Inbox.wait`."""
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_WAIT_S)
        while not self._events and not self._is_woken:
            if not self._await_ring(limit_s):
                break
        while not self._bell.empty():
            self._bell.get()  # an earlier ring: its events are in the deque, or were taken
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _await_ring(self, limit_s: float | None) -> bool:
        """Block until the bell rings. Return False if it doesn't in time."""
        try:
            self.num_moves = (self.num_moves + 1) | 1
            if self.num_moves == 1:
                self.first_block.give(None)
            self.is_waiting = True
            self._bell.get(timeout=limit_s)
            self.is_waiting = False
        except queue.Empty:
            self.is_waiting = False
            return False
        finally:
            self.num_moves = (self.num_moves + 2) & ~1  # even, wherever an interrupt came
        return True


# The workers ----------------------------------------------------------------------------------------------------------

JOIN_LIMIT_S = 1.5
"""How long `close` waits for the workers, which finish their tasks. Those that hang are left alone."""


class CrewWorker:
    """One worker. The executor calls its methods; a subclass says where it does its tasks."""

    def __init__(self, executor: Any, serial: int, worker_id: int) -> None:
        """Make a worker of a `CrewExecutor` that isn't started.

        `serial`: unique among all workers of the executor. `worker_id`: which of the n workers it is, from 0.
        """
        self.executor = executor
        self.serial = serial
        self.worker_id = worker_id
        self.stall: WorkerStalled | None = None
        """Why it would be killed, if it could be."""
        self.is_given_up = False
        """Written with the lock."""
        self._lock = threading.Lock()
        """Held while something is posted: nothing more may come of a worker that was given up."""

    def start(self) -> None:
        """Get ready for tasks."""

    def send(self, task: Any) -> None:
        """Have it do a task after those that it has. Never blocks."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Cancel what it does if possible, and `let_go` of it."""
        raise NotImplementedError

    def stop(self) -> None:
        """Let it end after its current task. Any thread. Idempotent."""
        raise NotImplementedError

    def join(self, limit_s: float) -> None:
        """Wait until it has ended, at most `limit_s`. Does nothing on the worker's own thread."""

    def stack(self) -> str:
        """Return its Python stack, from the user's code on; empty if it has none."""
        raise NotImplementedError

    def post(self, events: Iterable[Event]) -> None:
        """Hand over the events of a task. Any thread. Never blocks."""
        with self._lock:
            if not self.is_given_up:
                self.executor.post(events)

    def leave(self) -> None:
        """Let it end after its current task. Nothing more comes of it."""
        with self._lock:
            self.is_given_up = True
        self.stop()

    def let_go(self) -> None:
        """Say that nothing more comes of it. Any thread. Idempotent."""
        with self._lock:
            if not self.is_given_up:
                self.is_given_up = True
                self.executor.post([messages.Disconnected(self.serial, self.worker_id)])


class WorkerThread(CrewWorker):
    """A thread that does its tasks. It blocks for tasks only. A subclass has `serve`, which takes them from `tasks`."""

    def __init__(self, executor: Any, serial: int, worker_id: int) -> None:
        super().__init__(executor, serial, worker_id)
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """None: stop."""
        self._thread = LoaderThread(self.serve, f"{executor.name}-{worker_id}")

    def serve(self) -> None:
        """Do the tasks until None comes. On the thread."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, task: Any) -> None:
        """Have the thread do a task after those that it has."""
        self.tasks.put(task)

    def give_up(self) -> None:
        """Wait for it no more. It ends after its current task."""
        self.stop()
        self.let_go()

    def stop(self) -> None:
        """Let the thread end after its current task."""
        while not self.tasks.empty():
            try:
                self.tasks.get_nowait()
            except queue.Empty:  # the thread was faster
                break
        self.tasks.put(None)

    def join(self, limit_s: float) -> None:
        """Wait until the thread has ended."""
        self._thread.join(limit_s)

    def stack(self) -> str:
        """Return the thread's Python stack; empty if it has ended."""
        return stack_of(self._thread.ident or 0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.worker_id}{'' if self._thread.is_alive() else ' ended'}>"


class _State(Enum):
    """NEW ─open─► RUNNING ─stop─► STOPPED. `stop` works in each."""

    NEW = "new"
    RUNNING = "running"
    STOPPED = "stopped"


AWorker = TypeVar("AWorker", bound=CrewWorker)


class CrewExecutor(Executor, Generic[AWorker]):
    """The workers of one loader or stage. A subclass makes them, and has the words for them."""

    def __init__(self, name: str, *, leaves_stalled_out: bool) -> None:
        """Make an executor that isn't started. `name`: of its threads.

        `leaves_stalled_out`: as in `SchedulerSettings`.
        """
        self.name = name
        self.owner = ProcessOwner()
        """A fork of it has none of the workers."""
        self._events: deque[Event] = deque()
        """Of all workers."""
        self._inboxes = [ThreadInbox(self._events), ThreadInbox(self._events)]
        self._leaves_stalled_out = leaves_stalled_out
        self._lock = threading.RLock()
        """Guards the next two. Reentrant: a signal handler may close the loader on the thread that starts it."""
        self._state = _State.NEW
        self._workers: dict[int, AWorker] = {}
        """By serial number. Replaced as a whole, so that any thread may read it."""
        self._num_started = 0
        self.num_workers = 0
        """How many there are to be. Known once it has started."""
        self._ends_by_s = 0.0
        """When `close` waits no more for the workers. Known after `stop`."""

    @property
    def inboxes(self) -> Sequence[ThreadInbox]:
        """The loop's, and that of a thread which takes over while the loop is busy, and sends the next tasks."""
        return self._inboxes

    def _make(self, serial: int, worker_id: int) -> AWorker:
        """Return a worker that isn't started."""
        raise NotImplementedError

    def _stalled(self, stall: Stall) -> WorkerStalled:
        """Return the error for a stall."""
        raise NotImplementedError

    def _open(self, num_workers: int) -> bool:
        """Start the workers. Return False if another thread has stopped the executor."""
        with self._lock:
            if self._state is _State.STOPPED:
                return False
            self._state, self.num_workers = _State.RUNNING, num_workers
            for worker_id in range(num_workers):
                self._begin(worker_id)
            return True

    def _begin(self, worker_id: int) -> None:
        """Start a worker. Does nothing once the executor is stopped."""
        with self._lock:
            if self._state is not _State.RUNNING:
                return
            serial, self._num_started = self._num_started, self._num_started + 1
            worker = self._make(serial, worker_id)
            self._workers = {**self._workers, serial: worker}
            worker.start()

    def post(self, events: Iterable[Event]) -> None:
        """Have events come out of the inbox that is in use. Any thread."""
        self._events.extend(events)
        for inbox in self._inboxes:
            inbox.ring()

    def renew(self) -> list[Any]:
        """Leave all workers alone, which end after their current task, and start others."""
        for worker in self._workers.values():
            worker.leave()
        with self._lock:
            self._workers = {}
        self._events.clear()
        for worker_id in range(self.num_workers):
            self._begin(worker_id)
        return []

    def carry_out(self, action: ToDo) -> list[Any]:
        """Do what the scheduler decided. See `Executor`."""
        if isinstance(action, messages.Start):
            self._begin(action.worker_id)
            return []
        worker = self._workers.get(getattr(action, "worker", -1))
        if worker is None:  # it is being closed
            return []
        if isinstance(action, Send):
            worker.send(action)
        elif isinstance(action, messages.Kill):
            worker.stall = action.stall.error = self._stalled(action.stall)
            if self._leaves_stalled_out:
                worker.give_up()
            else:
                self.post([messages.ExecutorFailed(worker.stall)])
        elif isinstance(action, messages.Dismiss):
            worker.stop()
        elif isinstance(action, messages.Reap):
            if worker.stall is None or worker.is_given_up:
                self.post([messages.Ended(worker.serial, messages.Death(is_at_work=False))])
            else:  # a coroutine blocks its loop
                self.post([messages.ExecutorFailed(worker.stall)])
        elif isinstance(action, messages.Release):
            self._release(worker)
        return []

    def _release(self, worker: AWorker) -> None:
        """Forget a worker that has ended or was given up."""
        if not worker.is_given_up:
            worker.join(JOIN_LIMIT_S)
        with self._lock:
            self._workers = {serial: other for serial, other in self._workers.items() if other is not worker}

    def error_of(self, cause: messages.WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        return self._stalled(cause) if isinstance(cause, Stall) else super().error_of(cause)

    def notice_of(self, about: messages.WorkerLost | Stall | messages.TemplateLost) -> str:
        """Return the warning for the user."""
        return str(self._stalled(about)) if isinstance(about, Stall) else super().notice_of(about)

    def stop_workers(self) -> None:
        """Tell the workers to end. Any thread. Idempotent."""
        with self._lock:
            if self._state is not _State.STOPPED:
                self._state, self._ends_by_s = _State.STOPPED, time.monotonic() + JOIN_LIMIT_S
            workers = self._workers
        for worker in workers.values():
            worker.stop()

    def stop(self) -> None:
        """Do so, and wake whoever waits in the inbox. Any thread. Idempotent."""
        self.stop_workers()
        self.inboxes[0].wake()

    def close(self) -> list[Any]:
        """Wait for the workers to end, at most `JOIN_LIMIT_S` after `stop`, and forget them. Idempotent."""
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            if worker.is_given_up:
                continue
            worker.join(max(0.0, self._ends_by_s - time.monotonic()))
        return []
