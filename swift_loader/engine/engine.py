"""Hands the batches of a scheduler and its executor to the loop, and has the two act on each other.

    executor ──Inbox.wait──► events ──► scheduler ──► actions ──► executor    on the thread that leads
                                            │
    take ◄──────────── ledger.deliver ──────┘                                 on the loop's thread

Locks, taken in this order: the loop's, `dispatch_lock`, `lock`. All are reentrant, because a signal handler or
finaliser may close the loader on a thread that holds them. Nothing of the user's runs under `lock`.

Which thread receives (leader/followers):

    thread that leads ──kick──► parked ──resume──► leads        (the loop's thread kicks, leads itself, resumes)

For a small batch, a hand-over between threads costs more than everything else. So a loop that waits for each batch
receives the events itself. The receiver threads, one per worker up to 16, or one for all, take over while the loop is
busy: at once if its last steps were long, else when the first thread, which is parked, sees that it stays away. The
thread that leads blocks in its inbox, and uses no CPU while nothing happens.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any

from swift_loader.errors import LoaderClosed, ProtocolError, SwiftLoaderError, set_cause, warn
from swift_loader.executors.base import Executor, Inbox
from swift_loader.log import Log
from swift_loader.metrics.metrics import Metrics
from swift_loader.runtime import LoaderThread, is_interrupt
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.sampling.work import PlannedSource, WorkSource
from swift_loader.scheduler.delivery import Delivery, LeaseState
from swift_loader.scheduler.messages import Action, ExecutorFailed, Fail, GiveUp, Send, Stall, Warn
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings, SchedulerState
from swift_loader.transport.channel import explaining_limits

CLOSE_LIMIT_S = 4.5
"""How long `close` takes at most: to end the workers, then to wait for the loop's thread to leave `take`, for the
receiver threads, and for a thread to carry out its actions."""

MIN_WAIT_S = 0.05
"""How long each of these waits may take even if ending the workers took all the time."""

SHORT_ABSENCE_NS = 1_000_000
"""A loop that comes back sooner keeps receiving itself. A hand-over and back takes about 0.1 ms."""

LONG_ABSENCE_NS = 20_000_000
"""A loop whose steps were short, and that stays away for longer, validates or writes a checkpoint."""

LOOK_S = 0.05
"""How often the first thread, while it is parked, looks whether the loop stays away."""


class Engine:
    """The batches of one executor, in the order that its scheduler decides."""

    def __init__(
        self,
        executor: Executor,
        settings: SchedulerSettings,
        metrics: Metrics,
        notices: deque[str],
        log: Log | None = None,
    ) -> None:
        """Make an engine that isn't started. It owns the executor.

        `notices`: warnings for the user, which any thread may add. The loop's thread issues them.
        """
        self._executor = executor
        self.owner = executor.owner
        self._scheduler = Scheduler(settings)
        self._metrics = metrics
        self._notices = notices
        self._log = log
        self._loop_lock = threading.RLock()
        """Held by the thread that waits for a batch."""
        self.dispatch_lock = threading.RLock()
        """Held while actions are carried out, so that each worker gets its tasks in the order of the decisions."""
        self.lock = threading.RLock()
        """Guards the scheduler, apart from its watchdog, which only the loop's thread uses, and the number of ready
        batches for the metrics. Guards writes of the error."""
        self.error: BaseException | None = None
        """Why there are no more batches than those that are ready. It never becomes None again, so a thread may read it
        without the lock: at worst it sees the error one step later."""
        self._to_do: deque[Action] = deque()
        """Decided, but not carried out yet: an interrupt may come in between. Guarded by `dispatch_lock`."""
        self._unsent: OSError | None = None
        """Why the first of them wasn't sent. The next `act` tries again. Guarded by `dispatch_lock`."""
        self._of_stalls: list[str | BaseException] = []
        """Warnings of workers that hang, and errors that end the wait of the loop's thread. Guarded by
        `dispatch_lock`."""
        self._settings: PlanSettings | None = None
        """What workers know about the work that is delivered. The loop's thread uses it."""
        self._grace_s = 0.0
        """Seconds that replacing a worker may take. Set by `start`."""
        self._receivers: Receivers | None = None
        """None until `start`, and after `close`. Guarded by `_loop_lock`, which `close` may have to do without."""
        self._is_closing = False
        """Whether `close` is under way or has ended. Guarded by `lock`."""
        self.is_dirty = False
        """Whether the loop's thread is at what an exception would leave half done, or has left it so. `begin` has other
        workers do the work then. Only a thread that an exception has interrupted leaves it."""
        self._was_waiting = False
        """See `note_wait`."""

    @property
    def num_ready(self) -> int:
        """How many batches wait for the loop. Any thread."""
        return len(self._scheduler.ledger.ready)

    @property
    def num_samples(self) -> int:
        """Length of the dataset. Known after `start`."""
        return self._executor.plan.order.num_samples

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come from a worker; 0 before the first."""
        return self._executor.largest_batch_nbytes

    @property
    def fastest_build_s(self) -> float:
        """How long the fastest worker takes for a batch; infinite before the first one. Any thread."""
        with self.lock:
            return self._scheduler.ledger.workers.fastest_build_s

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Get ready to build batches. Blocks until the dataset is built. If it raises, it leaves nothing behind.

        Raises `WorkerDied`, or what building the dataset raised.
        """
        executor = self._executor
        try:
            with explaining_limits():
                executor.start()
                with self._loop_lock:  # a thread that closes the engine waits until the inbox isn't in use
                    self._check_open()
                    self._grace_s = executor.grace_s
                    self._receivers = Receivers(self, executor.inboxes)
                    self._receivers.hand_over()
        except BaseException:
            self.close()
            raise

    def _check_open(self) -> None:
        """Raise `LoaderClosed` if the engine was closed."""
        if self._scheduler.state is SchedulerState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one")

    def _open_receivers(self) -> Receivers:
        """Return the receivers. Raises `LoaderClosed` if the engine was closed, which ends them."""
        self._check_open()
        assert self._receivers is not None, "it has started"
        return self._receivers

    # The loop's side --------------------------------------------------------------------------------------------------

    def begin(
        self,
        source: WorkSource,
        settings: PlanSettings,
        resume: Mapping[int, bytes] | None = None,
        *,
        awaits_first: bool = False,
    ) -> None:
        """Make `take` deliver this work, and nothing that was handed out before.

        `source` hands out the work, on any thread. It may say that there is none, and have more later: `take`
        asks it again. It costs nothing to begin a plan where it is already. `settings`: what workers know about the
        work; the order's seed is the base seed of torch's workers. `resume`: where each worker's dataset continues, by
        the worker's id: a packed `Resume`. The others begin anew. `awaits_first`: block until the first batch is there,
        which stays. No other one is built before. Raises its error, or why there is none; then the caller must close.
        """
        executor = self._executor
        if self.owner is not None:
            self.owner.check()
        if self.is_dirty:
            self._renew()
        scheduler = self._scheduler
        ledger, before = scheduler.ledger, scheduler.ledger.source
        is_same_plan = isinstance(source, PlannedSource) and settings == (self._settings or executor.plan.settings)
        in_order = scheduler.limits.in_order
        is_there = is_same_plan and before is not None and before.is_at(source, ledger.num_delivered, in_order=in_order)
        if awaits_first:
            with self.lock:
                ledger.use_limits(replace(scheduler.limits, max_in_flight=1))
        self._metrics.end_pass()
        self.is_dirty, dropped = True, list[Any]()
        if not is_there:
            with self.dispatch_lock, self.lock:  # no task of the new plan may overtake it
                source.rewind()
                dropped = scheduler.begin(source, keeps_meaning=is_same_plan)
                executor.use_plan(scheduler.ledger.generation, Plan.of(self.num_samples, settings), resume)
        self.act()
        self.is_dirty, self._settings = False, settings
        del dropped  # outside the locks: the user's objects may have finalisers
        if awaits_first:
            self._await_first()

    def _renew(self) -> None:
        """Have other workers from now on, and nothing in flight: an interrupt may have left anything half done.

        If an interrupt ends this, the next call does it again.
        """
        executor = self._executor
        with self._loop_lock:
            receivers = self._open_receivers()
            if not receivers.stop(time.monotonic() + CLOSE_LIMIT_S):
                raise SwiftLoaderError(
                    f"the loop was interrupted, and a thread has been decoding a batch for {CLOSE_LIMIT_S:g} s since. "
                    f"Call next() again"
                )
            with self.dispatch_lock:
                garbage = executor.renew()
                with self.lock:
                    self._check_open()
                    dropped = self._scheduler.renew()
                self._to_do.clear()
                self._of_stalls.clear()
            for inbox in executor.inboxes:
                inbox.sleep()
            self._receivers = Receivers(self, executor.inboxes)
            self._receivers.hand_over()
        del dropped, garbage  # outside the locks

    def _await_first(self) -> None:
        with explaining_limits(), self._loop_lock:
            receivers = self._open_receivers()
            first = self._wait(receivers, takes=False)
            if first.error is not None:
                raise first.error
            with self.lock:
                self._scheduler.ledger.use_limits(self._scheduler.limits)
            self.act()
            receivers.hand_over()

    def end_pass(self) -> None:
        """Record that the loop met the end of its pass. Loop's thread."""
        self._metrics.end_pass(time.perf_counter_ns())
        if isinstance(self._scheduler.ledger.source, PlannedSource):  # workers build the next epoch
            self.hand_over_if_idle()
        self.issue_warnings()

    def issue_warnings(self) -> None:
        """Issue the warnings that were noted since the last call. Runs on the loop's thread, between two batches."""
        while self._notices:
            warn(self._notices.popleft())

    def take(self) -> Delivery:
        """Return the next batch, or the error in its place; after an epoch, the next epoch's first batch. Blocks.

        If the source of work has ended, so that there is no batch to wait for, the delivery says so.

        Errors of the batch or the executor are returned, not raised: `WorkerStalled`, `WorkerDied`, `LoaderClosed`, and
        what the user's code raised. So any exception that is raised comes from a signal handler, from a filter that
        makes a warning an error while no batch is taken, or from the kernel, which didn't take a task: the next call
        sends it again. It says nothing about the batch. Unless it has ended a mere wait, see `note_wait`, the caller
        has to `begin` where the loop is.

        The caller makes sure that this process isn't a fork of the one that started the executor.
        """
        metrics = self._metrics
        if self._notices:  # a filter may make it an error, so before there is a batch
            self._was_waiting = True
            self.issue_warnings()
            self._was_waiting = False
        entered_ns = time.perf_counter_ns()
        with self._loop_lock:
            self._was_waiting, self.is_dirty = False, True
            try:
                if not metrics.is_in_pass:
                    metrics.note_asked(entered_ns)
                receivers = self._receivers or self._open_receivers()
                num_ready = len(self._scheduler.ledger.ready)
                delivery = self.act(takes=True) or self._wait(receivers)
                left_ns = time.perf_counter_ns()
                receivers.leave(entered_ns, left_ns, is_over=delivery.is_end)
                delivery.number = metrics.note_delivery(delivery.arrival, entered_ns, left_ns, num_ready)
                if delivery.lease is not None:
                    delivery.lease.state = LeaseState.TAKEN
                if delivery.error is not None and delivery.failures:
                    # All samples failed: the last one's error says more than the worker's traceback.
                    set_cause(delivery.error, delivery.failures[-1].exception)
                self.is_dirty = False
            except SwiftLoaderError as error:  # our own error: signal handlers don't raise these
                self.is_dirty, delivery = False, Delivery(error=error)
            except BaseException:
                self._note_interrupt()
                raise
        if delivery.work is None and self._notices:  # what led to the error; nothing is lost if a filter raises one
            self.issue_warnings()
        return delivery

    def _note_interrupt(self) -> None:
        """Take in that an exception comes out of `take` or `is_ready`. A mere wait has nothing to be repeated."""
        receivers = self._receivers  # another thread may close the engine
        if receivers is not None and receivers.inbox.is_waiting:
            receivers.inbox.is_waiting, self._was_waiting, self.is_dirty = False, True, False

    def note_wait(self) -> bool:
        """Return whether the exception that has just come out of `take` has ended a mere wait: nothing has changed."""
        was_waiting, self._was_waiting = self._was_waiting, False
        return was_waiting

    def _end(self) -> Delivery | None:
        """Return why there is no next batch; None if there will be one. The lock is held. Raises `LoaderClosed`."""
        self._check_open()
        if self.error is not None:
            return Delivery(error=self.error)
        return Delivery(is_end=True) if self._scheduler.ledger.is_exhausted else None

    def _wait(self, receivers: Receivers, *, takes: bool = True) -> Delivery:
        """Receive until the next batch has arrived. Return it, the error or the end in its place; see `act`."""
        did_lead = receivers.loop_leads
        inbox = receivers.take()
        with self.lock:
            self._scheduler.watchdog.begin(time.monotonic(), self._grace_s)
        delivery = None if did_lead else self.act(takes=takes)  # the threads may have received it until now
        while delivery is None:
            if self._unsent is not None:  # there may be nothing to wait for
                inbox.is_waiting = True  # nothing is half done
                raise self._unsent
            self._receive_or_judge(inbox)
            delivery = self.act(takes=takes)
            if delivery is None and self.error is not None:  # what was just decided may have failed
                delivery = self.act(takes=takes)
        return delivery

    def is_ready(self) -> bool:
        """Return whether `take` would return without blocking. Receives what has arrived, and acts. Loop's thread.

        Raises what a signal handler raised meanwhile, see `take`.
        """
        with self._loop_lock:
            self.is_dirty = True
            try:
                is_ready = self._has_deliverable()
                receivers = self._receivers
                if not is_ready:  # the source may have more to send than when the loop took a batch
                    self.act()
                # If the threads lead, they have received what was there.
                if not is_ready and receivers is not None and receivers.loop_leads:
                    inbox = receivers.take()
                    while not is_ready and self._receive(inbox, 0):
                        self.act()
                        is_ready = self._has_deliverable()
                self.is_dirty = False
                return is_ready
            except SwiftLoaderError as error:  # our own, as in `take`, which raises it
                self.is_dirty = False
                self.fail(error)
                return False
            except BaseException:
                self._note_interrupt()
                raise

    def _has_deliverable(self) -> bool:
        with self.lock:
            return self._scheduler.ledger.next_deliverable() is not None

    # Events and actions -----------------------------------------------------------------------------------------------

    def receive_and_act(self, inbox: Inbox) -> None:
        """Receive events and act on them. Return at once if the inbox was woken."""
        if self._receive(inbox, None) and self._scheduler.has_to_decide:  # mostly the loop has assigned all that may be
            self.act()

    def _receive(self, inbox: Inbox, timeout_s: float | None) -> bool:
        """Wait for events, and let the scheduler handle them. Return whether there were any."""
        events = inbox.wait(timeout_s)
        if events:
            now_s = time.monotonic()
            with self.lock:
                for event in events:
                    try:
                        self._scheduler.handle(event, now_s)
                    except ProtocolError as error:
                        self._scheduler.handle(ExecutorFailed(error), now_s)
        return bool(events)

    def act(self, *, takes: bool | None = None) -> Delivery | None:
        """Carry out what the scheduler decides. To be called also when the source of work has more. Any thread.

        `takes`: return the next batch, the error or the end in its place, or None if it isn't ready. False: the batch
        stays. None: return nothing. Only the loop's thread gives another one than None.
        """
        delivery: Delivery | None = None
        garbage: list[Any] = []
        to_do = self._to_do
        with self.dispatch_lock:
            with self.lock:
                if takes:
                    delivery = self._scheduler.ledger.deliver() or self._end()
                elif takes is not None:
                    delivery = self._scheduler.ledger.next_deliverable() or self._end()
                to_do += self._scheduler.decide(time.monotonic())
            self._unsent = None
            while to_do:
                action = to_do[0]
                if isinstance(action, Send):  # nearly all are
                    to_do.popleft()
                    try:
                        garbage += self._executor.carry_out(action)
                    except OSError as error:  # the kernel has no memory for it just now, for example
                        if is_interrupt(error):
                            raise
                        to_do.appendleft(action)
                        self._unsent = error
                        break
                else:
                    garbage += self._carry_out(to_do.popleft())
        del garbage  # outside the locks
        return delivery

    def _carry_out(self, action: Action) -> list[Any]:
        executor = self._executor
        if isinstance(action, Fail):
            error = executor.error_of(action.cause)
            with self.lock:
                self.error = error
        elif isinstance(action, GiveUp):
            self._of_stalls.append(executor.error_of(action.stall))
        elif isinstance(action, Warn):
            notice = executor.notice_of(action.about)
            if isinstance(action.about, Stall):
                self._of_stalls.append(notice)
            else:  # a process is replaced
                self._notices.append(notice)
                self._metrics.note_restart()
                if self._log is not None:
                    self._log.write(notice)
        else:
            return executor.carry_out(action)
        return []

    def fail(self, error: BaseException) -> None:
        """Deliver what is ready, then this error. Any thread."""
        with self.lock:
            self._scheduler.handle(ExecutorFailed(error), time.monotonic())
        try:
            self.act()
        finally:
            with self.lock:
                self.error = self.error or error  # acting may have failed, too

    def _receive_or_judge(self, inbox: Inbox) -> None:
        """Receive events. After too long a wait, judge who the loop waits for.

        Raises `WorkerStalled` if no worker has had the batch for too long.
        """
        watchdog = self._scheduler.watchdog
        if watchdog.deadline_s == math.inf:
            self._receive(inbox, None)
            return
        now_s = self._note_time()
        left_s = max(0.0, watchdog.deadline_s - now_s)
        watchdog.rest(now_s, now_s + left_s)
        is_quiet = not self._receive(inbox, left_s)
        # Look once more before judging a worker: SIGSTOP and SIGCONT end a wait even if events have arrived.
        if is_quiet and self._note_time() >= watchdog.deadline_s and not self._receive(inbox, 0):
            with self.lock:
                self._scheduler.tick(time.monotonic())
            self.act()
            for stall in sorted(self._take_stalls(), key=lambda stall: not isinstance(stall, str)):  # warnings first
                if isinstance(stall, BaseException):
                    raise stall
                inbox.is_waiting = True  # a filter may make it an error, and nothing is half done
                warn(stall)
                inbox.is_waiting = False
        watchdog.rest(now_s := time.monotonic(), now_s)

    def _note_time(self) -> float:
        """Return the time. If this process was stopped, give the workers more time: they may have been stopped too."""
        now_s = time.monotonic()
        with self.lock:
            self._scheduler.wake(now_s)
        return now_s

    def _take_stalls(self) -> list[str | BaseException]:
        """Remove and return the warnings, and the errors that end the wait."""
        with self.dispatch_lock:
            taken, self._of_stalls = self._of_stalls, []
        return taken

    def hand_over_if_idle(self) -> None:
        """Have the threads receive if the loop is elsewhere. Any thread."""
        if self._loop_lock.acquire(blocking=False):
            try:
                receivers = self._receivers
                if not self.is_dirty and receivers is not None:
                    receivers.hand_over()
            except BaseException:  # some of the threads may lead, and others not
                self.is_dirty = True
                raise
            finally:
                self._loop_lock.release()

    # Another number of workers ----------------------------------------------------------------------------------------

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Have so many workers from now on, at least 1. Returns before they have started or ended. Any thread.

        `limits`: for so many workers. Raises `LoaderClosed`, or `RuntimeError` if the number can't change; nothing has
        changed then.
        """
        if self.owner is not None:
            self.owner.check()
        with self.dispatch_lock:
            with self.lock:
                self._check_open()
            self._executor.resize(num_workers, limits)
            if (receivers := self._receivers) is not None:  # another thread may close the engine
                receivers.add(self._executor.inboxes)
            try:
                with self.lock:
                    self._scheduler.resize(num_workers, limits)
                self.act()
            except BaseException:  # some may have been started, and others not
                self.is_dirty = True
                raise
        self.hand_over_if_idle()  # nobody may be listening to the workers that come and go

    # Stopping ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all processes and threads and free all resources, within 5 s. Idempotent and thread-safe."""
        if self.owner is not None and not self.owner.is_here():  # a fork: processes and threads are the parent's
            return
        closes = False
        try:
            with self.lock:
                if self._is_closing:
                    return
                closes = self._is_closing = True
            self._close()
        except BaseException:
            if closes:
                self._is_closing = False  # the next call does the rest
            raise

    def _close(self) -> None:
        with self.lock:
            dropped = self._scheduler.close()
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        self._executor.stop()
        # With limits: the loop's thread may be building a batch itself, which nobody can end. And a signal handler may
        # close the loader on a thread that holds a lock, for which the holder of the other one waits.
        with _held(self._loop_lock, deadline_s):
            if self._receivers is not None:
                # Without the dispatch lock: a receiver thread may be waiting for it.
                self._receivers.stop(max(deadline_s, time.monotonic() + MIN_WAIT_S))
                self._receivers = None  # it refers back
        with _held(self.dispatch_lock, deadline_s):
            garbage = self._executor.close()
        del dropped, garbage  # outside the locks: the user's objects may have finalisers

    def __repr__(self) -> str:
        return f"<Engine {self._scheduler!r}, {self._executor!r}>"


class _Leader(Enum):
    LOOP = "the loop"
    THREADS = "the threads"
    NOBODY = "nobody"
    """The threads were stopped."""


class Receivers:
    """Hands the receiving back and forth between the loop's thread and the receiver threads of one engine.

    The engine's loop lock guards it. Only `stop` may run without the lock: it uses no state but the threads. And
    `add` runs under the dispatch lock.
    """

    def __init__(self, engine: Engine, inboxes: Sequence[Inbox]) -> None:
        """Get ready. The loop leads. `inboxes`: the loop's, then one for each thread."""
        self._engine = engine
        self.inbox = inboxes[0]
        """The loop's."""
        self._threads: list[_ReceiverThread] = []
        self._added = deque(inboxes[1:])
        """Inboxes whose threads aren't started yet. Any thread appends."""
        self._num_inboxes = len(inboxes)
        self._leader = _Leader.LOOP
        self._left_ns = 0
        """When the loop last got a batch."""
        self._absence_ns = float(SHORT_ABSENCE_NS)
        """Smoothed time between two calls of the loop."""

    @property
    def loop_leads(self) -> bool:
        """Whether the loop leads: what the workers send stays in their pipes until it receives."""
        return self._leader is not _Leader.THREADS or not self._threads

    def add(self, inboxes: Sequence[Inbox]) -> None:
        """Have a thread for each of these inboxes, of which the first ones are known, from the next hand-over on."""
        self._added.extend(inboxes[self._num_inboxes :])
        self._num_inboxes = len(inboxes)

    def take(self) -> Inbox:
        """Park the threads. Return the inbox from which the caller receives until it calls `leave`."""
        if self._leader is _Leader.THREADS:
            self._leader = _Leader.LOOP
            for thread in self._threads:
                thread.park()
        return self.inbox

    def leave(self, entered_ns: int, left_ns: int, *, is_over: bool) -> None:
        """Record that the loop got its batch, or the end. The threads take over unless the loop will soon be back."""
        absence_ns = max(0, entered_ns - self._left_ns)
        self._absence_ns = 0.5 * (self._absence_ns + min(absence_ns, 100 * SHORT_ABSENCE_NS))
        self._left_ns = left_ns
        if (is_over or self._absence_ns > SHORT_ABSENCE_NS) and (self._added or self._leader is _Leader.LOOP):
            self.hand_over()

    def hand_over(self) -> None:
        """Let the threads lead. Start those that aren't started yet."""
        while self._added and self._leader is not _Leader.NOBODY:
            thread = _ReceiverThread(self, self._engine, self._added.popleft(), looks=not self._threads)
            self._threads.append(thread)
            thread.start()
            if self._leader is _Leader.LOOP:
                thread.park()
        if self._leader is _Leader.LOOP:
            self._leader = _Leader.THREADS
            for thread in self._threads:
                thread.resume()

    def look(self) -> None:
        """Have the threads lead if the loop leads, but stays away. The first thread runs it."""
        if self._leader is _Leader.LOOP and time.perf_counter_ns() - self._left_ns > LONG_ABSENCE_NS:
            self._engine.hand_over_if_idle()

    def stop(self, deadline_s: float) -> bool:
        """Stop the threads. Returns when they have ended, or at the deadline, and whether they have. Idempotent.

        A thread may be decoding, or wait for a lock: a signal handler may close the loader on a thread that holds it.
        """
        self._leader = _Leader.NOBODY
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


class _ReceiverThread(LoaderThread):
    """A thread that receives from some workers while the loop's thread doesn't. It leads until `park`."""

    def __init__(self, receivers: Receivers, engine: Engine, inbox: Inbox, *, looks: bool) -> None:
        """`looks`: it looks whether the loop stays away, while it is parked."""
        super().__init__(self._serve, "receiver")
        self._receivers, self._engine = receivers, engine
        self._inbox = inbox
        self._looks = looks
        # Queues and flags, because threading's semaphores and events have locks that are held in Python code: a signal
        # handler that raises there leaves a lock taken, or one released that isn't, and the garbage collector may close
        # the loader on a thread that holds one.
        self._parked: SimpleQueue[None] = SimpleQueue()
        """Has an entry each time the thread has parked, and one at its end."""
        self._resumed: SimpleQueue[None] = SimpleQueue()
        """Has an entry for each `resume` and `stop`."""
        self._is_parking = False
        """Set while `park` waits for the thread."""
        self._is_stopping = False

    def park(self) -> None:
        """Make the thread stop receiving, and wait until it has. The caller leads then."""
        if not self._is_stopping:
            self._is_parking = True
            self._inbox.wake()
            self._parked.get()

    def resume(self) -> None:
        """Let the thread lead again."""
        self._resumed.put(None)

    def stop(self) -> None:
        """Make the thread end, parked or not. Idempotent."""
        self._is_stopping = True
        self._inbox.wake()
        self._resumed.put(None)

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                self._engine.receive_and_act(self._inbox)
                if self._is_parking and not self._is_stopping:  # even if events keep arriving
                    self._is_parking = False
                    self._inbox.sleep()
                    self._parked.put(None)
                    self._wait_resumed()
        except BaseException as error:  # even a SystemExit of the user's decoder: the loop must hear of it
            self._engine.fail(error)
        finally:
            self._parked.put(None)  # a thread in `park` needn't wait any longer

    def _wait_resumed(self) -> None:
        """Wait until `resume` or `stop`, and look after the loop meanwhile."""
        while True:
            try:
                self._resumed.get(timeout=LOOK_S if self._looks else None)
            except Empty:
                self._receivers.look()
            else:
                return


@contextmanager
def _held(lock: threading.RLock, deadline_s: float) -> Iterator[None]:
    """Hold a lock, or go on without it after the deadline."""
    is_held = lock.acquire(timeout=max(MIN_WAIT_S, deadline_s - time.monotonic()))
    try:
        yield
    finally:
        if is_held:
            lock.release()
