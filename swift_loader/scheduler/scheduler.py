"""Decides what is done next: events and times come in, actions go out.

    executor ──event──► handle      decide ──actions──► executor      begin, ledger.deliver ◄── the loop

Guarantees: each batch of a generation is delivered exactly once, in order or as it gets ready, or the loop gets an
error. A batch that is lost with its worker is sent to another one. A worker that is gone is replaced, or the error says
why not. After `Fail`, batches that are ready are still delivered.

    RUNNING ──a failure──► FAILED; both ──close──► CLOSED

Not thread-safe: the caller holds its lock around each call. It carries out the actions after the release, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_loader.sampling.work import WorkSource, key_of
from swift_loader.scheduler import messages
from swift_loader.scheduler.ledger import Ledger
from swift_loader.scheduler.queues import Limits, Worker, WorkerMove, Workers, WorkerState
from swift_loader.scheduler.restarts import TEMPLATE, Decision, Judgement, Restarts, Watchdog

_AT_WORK = (WorkerState.READY, WorkerState.LEAVING)


class SchedulerState(Enum):
    """See the drawing above."""

    RUNNING = "running"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the decisions depend on."""

    limits: Limits
    max_restarts: int = 0
    """How many workers in a row with one id may be replaced before one of them builds a batch."""
    stall_warning_s: float | None = None
    """How long a worker may spend on a batch that the loop waits for before there is a warning; None: no warning."""
    timeout_s: float | None = None
    """How long it may spend before it is killed and replaced, and how long the loop waits for a batch that no worker
    has; None: no limit."""
    leaves_stalled_out: bool = False
    """The work of a worker that is killed for a stall isn't retried; the loop gets an error in its place. All workers
    are judged, by the time that they have spent; else those that the loop waits for, and since it waits."""
    replaces_stalled: bool = True
    """False: a worker that spends longer isn't killed. The loop gets the error, and may go on to wait."""
    num_workers: int | None = None
    """How many workers the executor starts. `resize` changes that. None: the number never changes."""


class Scheduler:
    """Schedules the batches of one loader."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.limits = settings.limits
        """`resize` replaces them. Their `in_order` never changes."""
        self.state = SchedulerState.RUNNING
        self.ledger = Ledger(Workers(settings.limits))
        """The batches in flight. The loop takes them from here. Then there may be room for more: call `decide`."""
        counts_waits = not settings.leaves_stalled_out
        self.watchdog = Watchdog(settings.stall_warning_s, settings.timeout_s, counts_waits=counts_waits)
        """The loop's waits. The caller says when a wait begins, rests and has its deadline; see `tick`. One thread
        uses it, which also calls `wake` and `tick`, so the caller needs no lock for it."""
        self._restarts = Restarts(settings.max_restarts)
        self._settings = settings
        self._num_wanted = settings.num_workers
        """The ids below are wanted. Each is that of one worker at most, or of one that is being started."""
        self._starting = set(range(settings.num_workers or 0))
        """Ids of workers that were started, and of which nothing was heard yet."""
        self._actions: list[messages.Action] = []
        """What `decide` returns first."""

    # The loop's side

    def begin(self, source: WorkSource, *, keeps_meaning: bool) -> list[Any]:
        """Begin a new generation. Return the batches that nobody needs any more.

        They hold the user's objects, whose finalisers may run any code: drop them outside the lock. `keeps_meaning`:
        equal work is the same batch as before. If not, no batch is blamed for the deaths so far.
        """
        if not keeps_meaning:
            self._restarts.forget_batches()
            for worker in self.ledger.workers:
                worker.work = None
        dropped, workers = self.ledger.in_flight(), self.ledger.workers
        workers.begin()
        self.ledger = Ledger(workers, self.ledger.generation + 1, source)
        return dropped

    def fail(self, cause: messages.WorkerLost | BaseException) -> None:
        """Stop after the batches that are ready."""
        if self.state is SchedulerState.RUNNING:
            self.state = SchedulerState.FAILED
            self._actions.append(messages.Fail(cause))

    def close(self) -> list[Any]:
        """Forget everything, and ignore later events. Return what is to be dropped outside the lock, see `begin`."""
        self.state = SchedulerState.CLOSED
        dropped = [self.ledger, *self._actions]
        self.ledger, self._actions = Ledger(Workers(self.limits)), []
        return dropped

    def renew(self) -> list[Any]:
        """Forget all workers and what is in flight, because others are started. Return the same as `begin`."""
        dropped = [self.ledger, *self._actions]
        self.ledger, self._actions = Ledger(Workers(self.limits), self.ledger.generation), []
        self._starting = set(range(self._num_wanted or 0))
        return dropped

    # Any thread's side

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Want another number of workers from now on, at least 1. Then call `decide`. No stream may be handed out.

        New workers get the lowest free ids. Those with the highest ids leave: they finish what they have. One that is
        leaving stays if it is wanted again.
        """
        if self.state is SchedulerState.CLOSED:
            return
        self.limits, self._num_wanted = limits, num_workers
        self.ledger.use_limits(limits)
        if self.state is SchedulerState.FAILED:
            return
        for worker in self.ledger.workers:
            self._keep_or_leave(worker)
        taken = self._starting.union(worker.worker_id for worker in self.ledger.workers)
        for worker_id in range(num_workers):
            if worker_id not in taken:
                self._restarts.forget_worker(worker_id)
                self._start(worker_id)

    def _start(self, worker_id: int) -> None:
        self._starting.add(worker_id)
        self._actions.append(messages.Start(worker_id))

    def _is_wanted(self, worker: Worker) -> bool:
        return self._num_wanted is None or worker.worker_id < self._num_wanted

    def _keep_or_leave(self, worker: Worker) -> None:
        is_wanted = self._is_wanted(worker)
        if worker.state is WorkerState.READY and not is_wanted:
            worker.move(WorkerMove.LEAVE)
            self._dismiss_if_done(worker)
        elif worker.state is WorkerState.LEAVING and is_wanted:
            worker.move(WorkerMove.STAY)

    def _dismiss_if_done(self, worker: Worker) -> None:
        """Let a worker go that is leaving, once it has answered all tasks."""
        is_done = worker.state is WorkerState.LEAVING and not worker.tasks
        if is_done and self.state is not SchedulerState.FAILED:
            worker.move(WorkerMove.DISMISS)
            self._actions.append(messages.Dismiss(worker.serial))

    # The executor's side

    @property
    def has_to_decide(self) -> bool:
        """Whether `decide` may return something. It needs no lock for what the calling thread has caused."""
        return bool(self._actions) or self.ledger.may_assign

    def decide(self, now_s: float) -> list[messages.Action]:
        """Return what to do now: first what events and times have caused, then each task for which there is room.

        Raises what the source of work raised. What was decided before comes with the next call.
        """
        if self.state is SchedulerState.RUNNING:
            self.ledger.assign(self._actions, now_s)
        if not self._actions:
            return []
        actions, self._actions = self._actions, []
        return actions

    def handle(self, event: messages.Event, now_s: float) -> None:
        """Take in what happened.

        Raises `ProtocolError` if a worker said what makes no sense. The caller then handles `ExecutorFailed`.
        """
        if self.state is SchedulerState.CLOSED:
            return
        match event:
            case messages.Answered() | messages.NoBatch():
                task, worker = event.task, self.ledger.take_in(event, now_s)
                is_needed = task.generation == self.ledger.generation
                if is_needed and self._restarts.is_counting and isinstance(event, messages.Answered):
                    self._restarts.note_batch(worker.worker_id, key_of(task.work))
                if worker.state is WorkerState.LEAVING:
                    self._dismiss_if_done(worker)
            case messages.SampleFailed():
                self.ledger.note_failure(event)
            case messages.Ready():
                worker = self._meet(event)
                worker.move(WorkerMove.READY)
                self._keep_or_leave(worker)  # it may have been dismissed while it started
            case messages.Disconnected():
                self._lose(self._meet(event), WorkerMove.DISCONNECT)
            case messages.Ended():
                self._take_ended(event, now_s)
            case messages.TemplateEnded():
                self._take_template_ended(event)
            case messages.ExecutorFailed():
                self.fail(event.error)

    def _meet(self, event: messages.Ready | messages.Disconnected) -> Worker:
        self._starting.discard(event.worker_id)
        return self.ledger.workers.meet(event.worker, event.worker_id)

    def _lose(self, worker: Worker, move: WorkerMove) -> None:
        """Give a worker no more tasks, and ask how it ended."""
        is_known = worker.state in (WorkerState.REAPED, WorkerState.PARTING)
        worker.move(move)
        if not is_known:
            # Its batches are LOST only when it is replaced: one that kills workers must not reach another one first.
            worker.work = self.ledger.work_of(worker)
            self._actions.append(messages.Reap(worker.serial))

    def _take_ended(self, event: messages.Ended, now_s: float) -> None:
        worker = self.ledger.workers.by_serial.get(event.worker)
        if worker is None:  # of one that was there before others took its place
            return
        was_dismissed, is_given_up, stall = worker.state is WorkerState.PARTING, False, worker.stall
        worker.move(WorkerMove.END)
        if stall is not None:
            is_given_up = self._settings.leaves_stalled_out or stall.is_of_sample
            is_left_out = is_given_up and stall.error is not None and not stall.is_of_sample
            if is_left_out and stall.work is not None and stall.work is self.ledger.work_of(worker):
                self.handle(messages.Answered(worker.tasks[0], error=stall.error, build_s=stall.busy_s), now_s)
        num_lost = self.ledger.remove_worker(worker)
        if self.state is SchedulerState.FAILED:
            return
        is_wanted = self._is_wanted(worker)
        if was_dismissed or not (is_wanted or num_lost):
            self._restarts.forget_worker(worker.worker_id)
        elif not (is_given_up or event.death.with_template):  # the template is judged by itself
            work = worker.work if event.death.is_at_work else None
            decision = self._restarts.note_death(worker.worker_id, key_of(work) if work is not None else None)
            is_survived = decision is Decision.REPLACE
            if is_survived and not is_wanted:
                decision = Decision.LET_GO
            num_in_a_row = self._restarts.num_in_a_row(worker.worker_id)
            lost = messages.WorkerLost(
                worker.serial, worker.worker_id, decision, num_in_a_row, work, num_lost, event.death
            )
            if not is_survived:
                self.fail(lost)
                return
            self._actions.append(messages.Warn(lost))
        self._actions.append(messages.Release(worker.serial))
        if is_wanted:
            self._start(worker.worker_id)

    def _take_template_ended(self, event: messages.TemplateEnded) -> None:
        if self.state is SchedulerState.FAILED:
            return
        if self._restarts.note_death(TEMPLATE, None) is Decision.REPLACE:
            self._actions.append(
                messages.Warn(messages.TemplateLost(event.error, self._restarts.num_in_a_row(TEMPLATE)))
            )
            self._actions += [] if event.is_replaced else [messages.ReplaceTemplate()]
        else:
            self.fail(event.error)

    # Time

    def wake(self, now_s: float) -> None:
        """Record that the loop runs again. If the process was stopped, the workers get more time."""
        if stopped_s := self.watchdog.wake(now_s):
            for worker in self.ledger.workers:
                worker.since_s += stopped_s

    def tick(self, now_s: float) -> None:
        """Judge the workers that the loop waits for, if `watchdog.deadline_s` has passed and no event came."""
        if now_s < self.watchdog.deadline_s or self.state is not SchedulerState.RUNNING:
            return
        judged = self.ledger.workers.busy() if self._settings.leaves_stalled_out else self.ledger.awaited()
        awaited = [
            worker
            for worker in self.ledger.workers
            if worker.state is WorkerState.KILLED or (worker.state in _AT_WORK and worker in judged)
        ]
        for worker in awaited:
            self._judge_worker(worker, now_s)
        if not awaited:
            judgement = self.watchdog.judge_itself(now_s)
            stall = messages.Stall(None, self.ledger.head(), now_s - self.watchdog.began_s)
            if judgement is not Judgement.NOTHING:
                self._actions.append(messages.GiveUp(stall) if judgement is Judgement.GIVE_UP else messages.Warn(stall))
        self.watchdog.plan_next_check([worker.since_s for worker in awaited], now_s)

    def _judge_worker(self, worker: Worker, now_s: float) -> None:
        since_s = worker.since_s
        judgement = self.watchdog.judge(worker.serial, since_s, now_s)
        if judgement is Judgement.GIVE_UP:
            self.watchdog.start_over(now_s)
        if worker.state is WorkerState.KILLED:
            if judgement is Judgement.GIVE_UP:  # SIGKILL had no effect: continue without this worker
                self._lose(worker, WorkerMove.ABANDON)
            return
        if self._settings.replaces_stalled and self.watchdog.is_half_over(worker.serial, since_s, now_s):
            self._actions.append(messages.Look(worker.serial))
        if judgement is not Judgement.NOTHING:
            stall = messages.Stall(worker.serial, self.ledger.work_of(worker), now_s - since_s)
            if judgement is Judgement.WARN:
                self._actions.append(messages.Warn(stall))
                return
            if not self._settings.replaces_stalled:
                self._actions.append(messages.GiveUp(stall))
                return
            worker.move(WorkerMove.KILL)
            worker.since_s, worker.stall = now_s, stall
            self._actions.append(messages.Kill(worker.serial, stall))

    def __repr__(self) -> str:
        return f"<Scheduler {self.state.value}, {self.ledger!r}>"
