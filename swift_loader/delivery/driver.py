"""Drives a scheduler with an executor's events, and the executor with the scheduler's actions.

    executor ──Inbox.wait──► events ──► scheduler ──► actions ──► executor

One direction, on whichever thread leads; see `receivers`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from swift_loader.errors import LoaderClosed, ProtocolError, warn
from swift_loader.executors.base import Executor, Inbox
from swift_loader.scheduler.actions import Action, Fail, GiveUp, Kill, Send, Stall, Warn
from swift_loader.scheduler.events import Event, ExecutorFailed
from swift_loader.scheduler.scheduler import Scheduler, SchedulerState

_REPEATABLE = (Fail, Kill)
"""Actions that must not be lost, and do no harm if they are carried out twice."""


class Driver:
    """A scheduler and an executor that act on each other."""

    def __init__(self, executor: Executor, scheduler: Scheduler, on_restart: Callable[[str], None]) -> None:
        """Bring the two together. The executor isn't started. `lock` guards the scheduler from now on.

        `on_restart` gets the warning about a process that is replaced, on any thread.
        """
        self.executor = executor
        self.scheduler = scheduler
        self._on_restart = on_restart
        # Both locks are reentrant: a signal handler or finaliser may close the loader on a thread that holds them.
        self.lock = threading.RLock()
        """Guards the scheduler, apart from its watchdog, which only the loop's thread uses. Guards writes of the error.
        Nothing of the user's runs under it."""
        self.dispatch_lock = threading.RLock()
        """Held while actions are carried out, so that each worker gets its tasks in the order of the decisions. Taken
        before the other lock."""
        self.error: BaseException | None = None
        """Why there are no more batches than those that are ready. It never becomes None again, so a thread may read it
        without the lock: at worst it sees the error one step later."""
        self._to_do: deque[Action] = deque()
        """Decided, but not carried out yet: an interrupt may come in between. Guarded by `dispatch_lock`."""
        self._stall_notices: list[str] = []
        """Warnings of workers that hang, for the loop's thread. Guarded by `dispatch_lock`."""
        self._wait_error: BaseException | None = None
        """Ends the wait of the loop's thread. Guarded by `dispatch_lock`."""

    def check_open(self) -> None:
        """Raise `LoaderClosed` if the scheduler was closed. The caller holds `lock`."""
        if self.scheduler.state is SchedulerState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one")

    def has_deliverable(self) -> bool:
        """Return whether a batch is ready for the loop."""
        with self.lock:
            return self.scheduler.ledger.next_deliverable() is not None

    def fail(self, error: BaseException) -> None:
        """Deliver what is ready, then this error. Any thread."""
        with self.lock:
            self.scheduler.handle(ExecutorFailed(error), time.monotonic())
        try:
            self.act()
        finally:
            with self.lock:
                self.error = self.error or error  # acting may have failed, too

    def receive_and_act(self, inbox: Inbox) -> None:
        """Receive events and act on them. Return at once if the inbox was woken."""
        if self.receive(inbox, None):
            self.act()

    def receive(self, inbox: Inbox, timeout_s: float | None) -> bool:
        """Wait for events, and let the scheduler handle them. Return whether there were any.

        Raises what a signal handler raised. No event is lost.
        """
        events = inbox.wait(timeout_s)
        if events:
            self._handle(events)
        inbox.is_taking_in = False
        if inbox.interrupt is not None:
            interrupt, inbox.interrupt = inbox.interrupt, None
            raise interrupt
        return bool(events)

    def _handle(self, events: Iterable[Event]) -> None:
        now_s = time.monotonic()
        with self.lock:
            for event in events:
                try:
                    self.scheduler.handle(event, now_s)
                except ProtocolError as error:
                    self.scheduler.handle(ExecutorFailed(error), now_s)

    def act(self) -> None:
        """Carry out what the scheduler decides.

        If a signal handler raises an exception meanwhile, the next call continues.
        """
        garbage: list[Any] = []
        to_do = self._to_do
        with self.dispatch_lock:
            with self.lock:
                to_do += self.scheduler.decide(time.monotonic())
            while to_do:
                action = to_do[0]
                if isinstance(action, Send):  # nearly all are
                    to_do.popleft()
                    garbage += self.executor.carry_out(action)
                elif isinstance(action, _REPEATABLE):
                    garbage += self._carry_out(action)
                    to_do.popleft()
                else:
                    garbage += self._carry_out(to_do.popleft())
        del garbage  # outside the locks

    def _carry_out(self, action: Action) -> list[Any]:
        if isinstance(action, Fail):
            error = self.executor.error_of(action.cause)
            with self.lock:
                self.error = error
        elif isinstance(action, GiveUp):
            self._wait_error = self.executor.error_of(action.stall)
        elif isinstance(action, Warn):
            note = self._stall_notices.append if isinstance(action.about, Stall) else self._on_restart
            note(self.executor.notice_of(action.about))
        else:
            return self.executor.carry_out(action)
        return []

    def receive_or_judge(self, inbox: Inbox) -> None:
        """Receive events. After too long a wait, judge who the loop waits for. An interrupt at any point is harmless.

        Raises `WorkerStalled` if no worker has had the batch for too long.
        """
        watchdog = self.scheduler.watchdog
        if watchdog.deadline_s == math.inf:
            self.receive(inbox, None)
            return
        now_s = self._note_time()
        left_s = max(0.0, watchdog.deadline_s - now_s)
        watchdog.rest(now_s, now_s + left_s)
        is_quiet = not self.receive(inbox, left_s)
        # Look once more before judging a worker: SIGSTOP and SIGCONT end a wait even if events have arrived.
        if is_quiet and self._note_time() >= watchdog.deadline_s and not self.receive(inbox, 0):
            self._judge()
        watchdog.rest(now_s := time.monotonic(), now_s)

    def _note_time(self) -> float:
        """Return the time. If this process was stopped, give the workers more time: they may have been stopped too."""
        now_s = time.monotonic()
        with self.lock:
            self.scheduler.wake(now_s)
        return now_s

    def _judge(self) -> None:
        """Warn of the workers that the loop waits for, if they take too long, or have them killed."""
        with self.lock:
            self.scheduler.tick(time.monotonic())
        self._take_stalls()  # an interrupt may have left those of an earlier wait
        self.act()
        notices, error = self._take_stalls()
        for notice in notices:
            warn(notice)
        if error is not None:
            raise error

    def _take_stalls(self) -> tuple[list[str], BaseException | None]:
        """Remove and return the warnings, and the error that ends the wait."""
        with self.dispatch_lock:
            taken = self._stall_notices, self._wait_error
            self._stall_notices, self._wait_error = [], None
        return taken

    def __repr__(self) -> str:
        return f"<Driver of {self.scheduler!r} and {self.executor!r}>"
