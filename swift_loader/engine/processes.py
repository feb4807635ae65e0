"""The engine of worker processes.

    next_batch: deliver ◄──ready── complete ◄──batch── worker ◄──task── assign ◄── room
    (loop's thread)                (loop's thread while it waits, else receiver threads)

    death of a worker ──► its batches are LOST in the ledger, others get them ──► coroner ──► a new worker, or an error
    (as above)                                                                    (pool's thread)

One lock guards the ledger, the coroner and the state. Decisions are made under it and carried out after its release. A
second lock is held while tasks are sent, so that each worker gets them in the order of the decisions. A third lock lets
only one thread at a time wait for batches.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_loader.bad_samples import SampleFailure
from swift_loader.engine.base import Delivery
from swift_loader.engine.builds import settle
from swift_loader.engine.coroner import Case, Coroner
from swift_loader.engine.duty import Duty
from swift_loader.engine.failures import attached, describe_batch, rebuild, rebuild_samples
from swift_loader.engine.forks import check_process
from swift_loader.engine.interrupts import is_interrupt
from swift_loader.engine.lease import Loan
from swift_loader.engine.ledger import Assignment, Ledger
from swift_loader.engine.pool import WorkerPool
from swift_loader.engine.receiver import Listening
from swift_loader.engine.stalls import StallWatch, Step
from swift_loader.engine.worker import WorkerHandle
from swift_loader.errors import (
    DatasetMismatch,
    LoaderClosed,
    ProtocolError,
    SwiftLoaderError,
    WorkerDied,
    WorkerStalled,
)
from swift_loader.metrics import Metrics
from swift_loader.notices import warn
from swift_loader.plan import Plan, PlanSettings
from swift_loader.transport.channel import Received
from swift_loader.transport.descriptors import explained, new_eventfd
from swift_loader.transport.frames import Frame, Kind, unpack_frame
from swift_loader.transport.messages import Batch, Failure, SampleFailed, Stage, Verdicts
from swift_loader.transport.reports import BuildReport, Verdict
from swift_loader.transport.segments import Segment
from swift_loader.worker.fetch import OnError

__all__ = ["ProcessEngine"]

_TRIAL = (-1, -1)
"""The (epoch, step) that marks the trial batch."""


MAX_RECEIVERS = 16
"""Threads that listen to workers while the loop doesn't; with more, they only wait for each other's GIL."""

_GRACE_BUILDS = 3
"""When no worker has the batch, a new build of the dataset may take this many times as long as the first one."""


class EngineState(Enum):
    """NEW ─► STARTING ─► RUNNING ─► BROKEN; any of them ─► CLOSED."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    """The engine failed. Batches that are ready are still delivered; then each call raises the error."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A worker's answer to a task: a batch, or why there is none."""

    batch: Any
    error: BaseException | None
    failures: tuple[SampleFailure, ...] = ()
    build_s: float = 0.0
    loan: Loan | None = None


@dataclass(frozen=True, slots=True)
class _Stall:
    """Why a worker is being killed."""

    text: str
    """Where it hung, and for how long."""
    traces: str


class ProcessEngine:
    """Batches from worker processes."""

    def __init__(
        self,
        pool: WorkerPool,
        metrics: Metrics,
        log: Callable[[str], None],
        notify: Callable[[str], None],
        on_segment: Callable[[Segment], None] | None = None,
    ) -> None:
        """Make an engine that isn't started.

        Args:
            pool: The engine owns it. Its template may be running already.
            metrics: Counts the stages.
            log: Writes a line to the log. Any thread calls it.
            notify: Queues a warning for the user. Any thread calls it.
            on_segment: Gets each segment before the first batch lies in it, and again with each batch. Any thread
                calls it.
        """
        self._pool = pool
        self._setup = pool.setup
        self._settings = settings = pool.settings
        self._metrics = metrics
        self._log = log
        self._notify = notify
        self._on_segment = on_segment
        self._owner_pid = os.getpid()
        self._state = EngineState.NEW
        self._error: BaseException | None = None
        self._is_halfway = False
        """Whether the loop is doing something that can't be repeated after an interrupt."""
        self._interrupt: Exception | None = None
        """The exception of a signal handler that interrupted the decoding of a batch. Raised once that is done."""
        # All locks are reentrant: a signal handler or finaliser may close the loader on a thread that holds them.
        self._lock = threading.RLock()
        """Guards the state, the error, the ledger and the trial batch."""
        self._dispatch_lock = threading.RLock()
        self._loop_lock = threading.RLock()
        """Held by the thread that waits for a batch."""
        self._wake = new_eventfd()
        """Readable once the engine is broken or closed."""
        self._ledger: Ledger[_Outcome] = Ledger(settings.limits)
        self._plan: Plan | None = None
        self._duty: Duty | None = None
        self._coroner = Coroner(settings.max_restarts)
        self._left_at: dict[int, tuple[tuple[int, int] | None, str]] = {}
        """Workers that have ended, by serial number: the (epoch, step) that each was building, as numbers and words."""
        self._stalls: dict[int, _Stall] = {}
        """Workers that are being killed, by serial number."""
        self.largest_batch_nbytes = 0
        """Of the batches that workers have sent; 0 before the first."""
        self._probed: _Outcome | None = None
        """The trial batch, until the loop's first batch is assigned. In most runs it is that first batch."""
        self._prober: int | None = None
        """Serial number of the worker that is building the trial batch."""
        self._failed: dict[tuple[int, int, int], dict[int, SampleFailed]] = {}
        """Failed samples of batches that haven't arrived, by (worker, generation, sequence), then by position. The
        worker is part of the key because a report of a worker that dies doesn't hold for the rebuilt batch."""

    @property
    def num_samples(self) -> int:
        """Length of the dataset. Known after `start`."""
        assert self._plan is not None, "the engine hasn't started"
        return self._plan.order.num_samples

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start template and workers. Wait for the dataset and, with `validate`, for a trial batch.

        Raises:
            WorkerDied: A process died.
            Exception: Whatever building the dataset or the trial batch raised.
        """
        self._state = EngineState.STARTING
        try:
            with explained():
                self._start()
            with self._lock:
                self._check_open()
            assert self._duty is not None
            self._duty.hand_back()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        num_samples = self._pool.start_template(self._warn_of_template, self._settings.stall_warning_s)
        if self._pool.reason_for_own_datasets:
            self._log(f"each worker builds its own dataset: {self._pool.reason_for_own_datasets}")
        self._plan = Plan.of(num_samples, self._setup.plan)
        self._pool.start_workers(self)
        self._listen()
        self._pool.start_others()
        if self._setup.options.validate and self._plan.trial_epoch is not None:
            self._await_probe()

    def _warn_of_template(self) -> None:
        warn(
            f"building the dataset has taken {self._settings.stall_warning_s:g} s so far"
            f"{attached(traces=self._pool.ask_for_stacks())}"
        )

    def _listen(self) -> None:
        num_threads = min(self._settings.num_workers, MAX_RECEIVERS) if self._settings.thread_per_worker else 1
        self._duty = Duty(self._pool.workers.values(), num_threads, self._wake, self)
        with self._lock:
            self._check_open()
            if self._error is not None:
                raise self._error
            self._state = EngineState.RUNNING
        self._duty.begin()

    def _await_probe(self) -> None:
        assert self._duty is not None
        assert self._plan is not None
        listening, watch = self._duty.take(), self._new_watch()
        while True:
            with self._lock:
                self._check_open()
                if self._probed is None and self._error is not None:
                    raise self._error
                if self._probed is not None:
                    probed = self._probed
                    break
                living = [worker for serial, worker in self._pool.workers.items() if serial not in self._left_at]
                living = [worker for worker in living if worker.is_ready]  # so that the time of its start doesn't count
                if self._prober is None and living:
                    self._prober = living[0].serial
                    living[0].send(Assignment(self._prober, 0, 0, self._plan.trial_epoch or 0, 0))
            self._listen_or_look(listening, watch)
        if probed.error is not None:
            raise probed.error
        if self._setup.options.on_error is not OnError.RAISE or not self._settings.in_order:
            self._probed = None  # its failed samples aren't known; out of order, it would always be delivered first

    # The loop's side --------------------------------------------------------------------------------------------------

    def seek(self, epoch: int, step: int, plan: PlanSettings) -> None:
        """Make `next_batch` continue at this batch of this plan. Costs nothing if the engine is there already."""
        check_process(self._owner_pid)
        self._is_halfway = True
        try:
            dropped = self._seek(epoch, step, plan)
            self._dispatch()
        except BaseException as interrupt:
            self._note_interrupt(interrupt)
            raise
        self._is_halfway = False
        del dropped  # outside the locks: the user's objects may have finalisers

    def _seek(self, epoch: int, step: int, plan: PlanSettings) -> list[_Outcome]:
        """Seek, and return the ready batches that nobody needs any more."""
        assert self._plan is not None
        with self._dispatch_lock:  # no task of the new plan may overtake it
            with self._lock:
                is_new_plan = plan != self._plan.settings
                if is_new_plan:
                    self._plan = Plan.of(self.num_samples, plan)
                    self._coroner.forget_batches()
                dropped = self._ledger.seek(epoch, step, self._plan.num_batches, is_new_plan=is_new_plan)
                generation = self._ledger.generation
                self._failed = {key: failed for key, failed in self._failed.items() if key[1] == generation}
            for worker in self._pool.workers.values() if is_new_plan else ():
                worker.follow(generation, plan)
        return dropped

    def next_batch(self) -> Delivery:
        """Return the next batch or its error; see `Engine.next_batch`."""
        check_process(self._owner_pid)
        entered_ns = time.perf_counter_ns()
        with self._loop_lock:
            try:
                self._is_halfway = True
                num_ready, delivery = self._try_deliver()
                if delivery is None:
                    delivery = self._wait()
                self._dispatch()
                left_ns = time.perf_counter_ns()
                assert self._duty is not None
                self._duty.leave(entered_ns, left_ns, is_epoch_over=self._ledger.is_between_epochs)
                self._is_halfway = False
            except SwiftLoaderError as error:  # our own error: signal handlers don't raise these
                return self._refuse(error)
            except BaseException as interrupt:
                self._note_interrupt(interrupt)
                raise
        self._metrics.note_wait(left_ns - entered_ns, num_ready)
        return delivery

    def _refuse(self, error: BaseException) -> Delivery:
        return Delivery(None, *self._ledger.position, error=error)

    def _note_interrupt(self, interrupt: BaseException) -> None:
        """Break the engine if the interrupt came while a batch was taken. It is harmless during a wait.

        An interrupt is Ctrl-C or any other exception of a signal handler.
        """
        if self._is_halfway or (self._duty is not None and self._duty.is_taking_in):
            error = SwiftLoaderError(
                f"the loop was interrupted ({type(interrupt).__name__}) while it took a batch, so a batch may be lost; "
                f"make a new loader"
            )
            error.__cause__ = interrupt
            self._break(error)

    def _wait(self) -> Delivery:
        """Receive from the workers until the next batch has arrived."""
        assert self._duty is not None
        listening, watch = self._duty.take(), self._new_watch()
        while True:
            _, delivery = self._try_deliver()
            if delivery is not None:
                return delivery
            self._dispatch()
            self._is_halfway = False
            self._listen_or_look(listening, watch)
            self._is_halfway = True

    def _try_deliver(self) -> tuple[int, Delivery | None]:
        """Return how many batches are ready, and the next batch, its error, or None if it isn't ready.

        Raises:
            LoaderClosed: The engine was closed.
        """
        with self._lock:
            self._check_open()
            num_ready = self._ledger.num_ready
            num_before = None if self._settings.in_order else self._ledger.position[1]
            delivered = self._ledger.deliver()
            if delivered is not None:
                sequence, outcome = delivered
                place, loan = self._ledger.locate(sequence), outcome.loan
                if loan is not None:
                    loan.take()
                return num_ready, Delivery(outcome.batch, *place, outcome.failures, num_before, outcome.error, loan)
            return num_ready, None if self._error is None else self._refuse(self._error)

    def is_ready(self) -> bool:
        """Return whether `next_batch` would return without blocking; see `Engine.is_ready`."""
        with self._loop_lock:
            try:
                self._is_halfway = False
                return self._has_deliverable() or self._take_in_what_is_here()
            except SwiftLoaderError as error:  # our own, as in `next_batch`, which raises it
                self._break(error)
                return False
            except BaseException as interrupt:
                self._note_interrupt(interrupt)
                raise

    def _has_deliverable(self) -> bool:
        with self._lock:
            return self._ledger.has_deliverable

    def _take_in_what_is_here(self) -> bool:
        """Take in messages until the next batch is here, or there are none; return whether it is."""
        if self._duty is None or not self._duty.loop_listens:  # the threads of ours have taken in what was there
            return False
        listening = self._duty.take()
        while listening.listen(0):
            self._raise_interrupt()
            self._is_halfway = True
            self._dispatch()
            self._is_halfway = False
            if self._has_deliverable():
                return True
        return False

    def _dispatch(self) -> None:
        """Send all tasks for which there is room."""
        dropped = None
        given_up: list[Segment] = []
        with self._dispatch_lock:
            with self._lock:
                assignments = self._ledger.assign() if self._state is EngineState.RUNNING else []
                if assignments and self._probed is not None:
                    dropped, self._probed = self._probed, None
                    assignments = self._use_trial(dropped, assignments)
            workers = self._pool.workers
            for assignment in assignments:
                if assignment.worker in workers:  # else the worker is gone, and its tasks will be lost in the ledger
                    given_up += workers[assignment.worker].send(assignment)
        del dropped, given_up  # outside the locks: the user's objects may have finalisers, and unmapping takes a while

    def _use_trial(self, trial: _Outcome, assignments: list[Assignment]) -> list[Assignment]:
        """Use the trial batch for the first task if it is the same. Return the tasks to send. The caller locks."""
        assert self._plan is not None
        first = assignments[0]
        if self._plan.settings != self._setup.plan or (first.epoch, first.step) != (self._plan.trial_epoch, 0):
            return assignments
        self._ledger.complete(first.worker, first.generation, first.sequence, trial, trial.build_s)
        return [*assignments[1:], *self._ledger.assign()]

    def _check_open(self) -> None:
        if self._state is EngineState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one")

    # Workers that hang; the loop's thread -----------------------------------------------------------------------------

    def _new_watch(self) -> StallWatch:
        return StallWatch(self._settings.stall_warning_s, self._settings.timeout_s, time.monotonic())

    def _listen_or_look(self, listening: Listening, watch: StallWatch) -> None:
        """Receive messages. After too long a wait, look for a stall. An interrupt at any point is harmless."""
        if watch.check_at_s == math.inf:
            listening.listen()
        else:
            now_s = self._note_stop(watch)
            left_s = max(0.0, watch.check_at_s - now_s)
            watch.expect(now_s, now_s + left_s)
            is_quiet = not listening.listen(left_s)
            # Look once more before judging a worker: SIGSTOP and SIGCONT end a wait even if messages have arrived.
            if is_quiet and self._note_stop(watch) >= watch.check_at_s and not listening.listen(0):
                self._look_for_stall(watch)
            watch.expect(now_s := time.monotonic(), now_s)
        self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        """Raise what a signal's handler raised while a batch was taken in."""
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt

    def _note_stop(self, watch: StallWatch) -> float:
        """Return the time. If this process was stopped, give the workers more time: they may have been stopped too."""
        now_s = time.monotonic()
        if stopped_s := watch.note_time(now_s):
            with self._dispatch_lock:  # so that no thread is sending a task
                for worker in self._pool.workers.values():
                    worker.postpone(stopped_s)
        return now_s

    def _look_for_stall(self, watch: StallWatch) -> None:
        now_s = time.monotonic()
        with self._lock:
            serials = self._ledger.awaited() if self._prober is None else [self._prober]
        workers = [worker for worker in map(self._pool.workers.get, serials) if worker is not None]
        workers = [worker for worker in workers if worker.serial not in self._left_at]  # else it is being replaced
        for worker in workers:
            since_s = worker.busy_since_s
            step = watch.judge(since_s, now_s)
            if step is Step.GIVE_UP:
                self._give_up(worker, now_s - since_s)
                watch.start_over(now_s)
            elif step is Step.WARN:
                who, what = self._who(worker), self._at(worker, now_s - since_s)
                warn(f"{who} {what}{attached(traces=worker.ask_for_stacks())}")
        grace_s = _GRACE_BUILDS * self._pool.build_s
        if not workers:
            step = watch.judge_itself(now_s, grace_s)
            text = f"no worker is ready to build {self._describe(*self._ledger.position)}"
            if step is Step.GIVE_UP:
                raise WorkerStalled(
                    f"{text}, for longer than timeout={self._settings.timeout_s:g} s plus {_GRACE_BUILDS} times the "
                    f"{self._pool.build_s:.1f} s that the first build of the dataset took. If workers need longer to "
                    f"start, raise timeout; else find out what building the dataset waits for"
                )
            if step is Step.WARN:
                warn(f"{text}, for {self._settings.stall_warning_s:g} s now")
        watch.plan_next_check([worker.busy_since_s for worker in workers], now_s, grace_s)

    def _give_up(self, worker: WorkerHandle, busy_s: float) -> None:
        """Kill a worker that hangs. If SIGKILL had no effect before, continue without it."""
        if worker.serial in self._stalls:
            self.on_end(worker, None)
            return
        text = f"{self._at(worker, busy_s)}, longer than timeout={self._settings.timeout_s:g} s, and was killed"
        self._stalls[worker.serial] = _Stall(text, worker.ask_for_stacks(by_force=True))
        worker.process.send_signal(signal.SIGKILL)

    def _at(self, worker: WorkerHandle, busy_s: float) -> str:
        with self._lock:
            building = _TRIAL if worker.serial == self._prober else self._ledger.building(worker.serial)
        if building is None:
            return f"has been at a batch that isn't needed any more for {busy_s:.1f} s"
        position, where = worker.position_in_batch(), self._describe(*building)
        indices = self._indices(*building)
        if position is not None:
            is_fetched = position >= len(indices)
            where += ", with all samples fetched," if is_fetched else f", at dataset index {indices[position]},"
        return f"has been at {where} for {busy_s:.1f} s"

    # The listener's side ----------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerHandle, received: Received) -> None:
        """Process one message. Runs on the thread that listens."""
        frame = unpack_frame(received.data)
        if frame.kind is Kind.BATCH:
            self._take_batch(worker, Batch.unpack(frame))
        elif frame.kind is Kind.SEGMENT:
            segment = worker.add_segment(frame, received.descriptors)
            if self._on_segment is not None:
                self._on_segment(segment)
        elif frame.kind is Kind.SEGMENT_GONE:
            worker.drop_segment(frame)
        elif frame.kind is Kind.READY:
            self._take_report(worker, worker.note_ready(frame, received.descriptors))
        elif frame.kind is Kind.VERIFIED:
            self._take_verdicts(worker, Verdicts.unpack(frame).by_index)
        elif frame.kind is Kind.SAMPLE_FAILED:
            self._note_failed(worker, SampleFailed.unpack(frame))
        elif frame.kind is Kind.FAILURE:
            self._take_failure(worker, Failure.unpack(frame))
        else:
            self._take_note(worker, frame)

    def _take_report(self, worker: WorkerHandle, report: BuildReport) -> None:
        """Give tasks to a worker that is ready, unless its dataset differs from the others'."""
        try:
            with self._pool.builds_lock:
                differing = self._pool.builds.compare(report, self._who(worker))
        except DatasetMismatch as error:
            self._break(error)
        else:
            if differing:
                worker.ask_to_verify(differing)
            else:
                self._count_on(worker)

    def _take_verdicts(self, worker: WorkerHandle, verdicts: dict[int, Verdict]) -> None:
        try:
            settle(worker.suspected or [], verdicts, self._who(worker))
        except DatasetMismatch as error:
            self._break(error)
        else:
            self._count_on(worker)

    def _count_on(self, worker: WorkerHandle) -> None:
        worker.suspected = []
        with self._lock:
            self._ledger.add_worker(worker.serial)

    def on_pause(self) -> None:
        """Send tasks, after a receiver thread has processed what had arrived."""
        self._dispatch()

    def _note_failed(self, worker: WorkerHandle, failed: SampleFailed) -> None:
        key = (worker.serial, failed.failure.generation, failed.failure.sequence)
        with self._lock:
            if 0 < failed.failure.generation == self._ledger.generation:  # of the trial batch they aren't wanted
                self._failed.setdefault(key, {})[failed.position] = failed

    def _take_failed(self, worker: WorkerHandle, generation: int, sequence: int) -> tuple[SampleFailure, ...]:
        """Return the failed samples of a batch that has arrived."""
        with self._lock:
            failed = self._failed.pop((worker.serial, generation, sequence), None)
            if not failed or generation != self._ledger.generation:
                return ()
            epoch, step = self._ledger.locate(sequence)
            where = f", {self._describe(epoch, step)}"
        return rebuild_samples(failed.values(), epoch, step, self._who(worker), self._pool.definitions, where)

    def _take_batch(self, worker: WorkerHandle, batch: Batch) -> None:
        build_s = (batch.fetch_ns + batch.collate_ns + batch.encode_ns) / 1e9
        with self._lock:
            wanted = batch.generation in (0, self._ledger.generation)
            self.largest_batch_nbytes = max(self.largest_batch_nbytes, batch.used_nbytes or batch.meta_nbytes)
        started_ns = time.perf_counter_ns()
        if wanted:
            failures = self._take_failed(worker, batch.generation, batch.sequence) if self._failed else ()
            outcome = self._decode(worker, batch, failures, build_s)
        else:
            worker.discard(batch)
            outcome = _Outcome(None, None)
        self._metrics.note_batch(batch, time.perf_counter_ns() - started_ns)
        self._complete(worker, batch.generation, batch.sequence, outcome, build_s)

    def _decode(
        self, worker: WorkerHandle, batch: Batch, failures: tuple[SampleFailure, ...], build_s: float
    ) -> _Outcome:
        """Return the batch, or the error of decoding it, which `next` raises in the batch's place."""
        if self._on_segment is not None and (segment := worker.segment_of(batch)) is not None:
            self._on_segment(segment)
        memory, loan = worker.lend(batch)
        try:
            return _Outcome(worker.decode(batch, memory), None, failures, build_s, loan)
        except Exception as error:
            if not is_interrupt(error):
                return _Outcome(None, error)
            self._interrupt = error
        try:
            return _Outcome(worker.decode(batch, memory), None, failures, build_s, loan)
        except Exception as error:
            return _Outcome(None, error)

    def _take_failure(self, worker: WorkerHandle, failure: Failure) -> None:
        if failure.stage is Stage.BUILD:
            self._break(rebuild(failure, self._who(worker), self._pool.definitions))
            return
        with self._lock:
            current = failure.generation == self._ledger.generation and failure.generation > 0
            epoch, step = self._ledger.locate(failure.sequence) if current else _TRIAL
        where = f", {self._describe(epoch, step)}"
        error = rebuild(failure, self._who(worker), self._pool.definitions, where)
        failures = self._take_failed(worker, failure.generation, failure.sequence)
        if failures:  # all samples of the batch failed: the last one's error says more than the worker's traceback
            error.__cause__ = failures[-1].exception
        self._complete(worker, failure.generation, failure.sequence, _Outcome(None, error), 0.0)

    def _complete(
        self, worker: WorkerHandle, generation: int, sequence: int, outcome: _Outcome, build_s: float
    ) -> None:
        worker.note_answer()
        with self._lock:
            if generation == 0:
                self._probed, self._prober = outcome, None
                self._coroner.note_batch(worker.place, _TRIAL)
                return
            is_wanted = self._ledger.complete(worker.serial, generation, sequence, outcome, build_s)
            if is_wanted and self._coroner.has_open_cases:
                self._coroner.note_batch(worker.place, self._ledger.locate(sequence))

    def _take_note(self, worker: WorkerHandle, frame: Frame) -> None:
        with self._lock:
            if frame.kind is Kind.SKIPPED:
                self._ledger.skip(worker.serial, frame.generation)
                worker.note_answer()
            else:
                raise ProtocolError(f"{self._who(worker)} sent an unexpected message: {frame.kind.name}")

    def on_end(self, worker: WorkerHandle, error: Exception | None) -> None:
        """Handle that a worker is gone, or that it sent an invalid message. Runs on the thread that listens."""
        assert self._duty is not None
        self._duty.forget(worker)  # for all threads that may be on duty next, so that the end is handled once
        with self._lock:
            if self._state is not EngineState.RUNNING or worker.serial in self._left_at:
                return
            building = self._ledger.building(worker.serial)
            if self._prober == worker.serial:
                building, self._prober = _TRIAL, None
            # If it died with the task still in its pipe, the batch isn't the cause.
            if not worker.is_at_work:
                building = None
            self._left_at[worker.serial] = building, self._describe(*building) if building is not None else ""
        if error is not None:
            self._break(error)
        else:
            self._pool.replace(worker)

    def on_failure(self, error: BaseException) -> None:
        """Handle that one of our threads ended with an error. Runs on that thread."""
        self._break(error)

    # The pool's side --------------------------------------------------------------------------------------------------

    def on_worker_death(self, worker: WorkerHandle, *, died_with_template: bool) -> bool:
        """Handle the death of a worker, after `on_end`. Return whether to replace it."""
        building, where = self._left_at[worker.serial]
        traces, stderr = worker.process.witness.last_traces(), worker.process.witness.last_lines()
        with self._lock:  # its batches are LOST only now: one that kills workers must not reach another worker first
            if self._state is not EngineState.RUNNING:
                return False
            num_lost = self._ledger.remove_worker(worker.serial)
            stall = self._stalls.pop(worker.serial, None)
            if died_with_template:
                return True
            case = Case(
                who=self._who(worker),
                place=worker.place,
                exit_code=worker.process.exit_code,
                batch=building,
                where=where,
                num_lost=num_lost,
                stall=stall.text if stall is not None else "",
                traces=stall.traces if stall is not None else traces,
                stderr=stderr,
            )
            finding = self._coroner.examine(case)
            if finding.error is not None:
                self._break(finding.error)
                return False
            self._notify(finding.notice)  # before the loop can get a batch that another worker rebuilds
        self._note_restart(finding.notice)
        self._dispatch()  # other workers can build its batches
        return True

    def on_template_death(self, error: WorkerDied) -> bool:
        """Handle the death of the template, with which its workers died. Return whether to replace it."""
        with self._lock:
            if self._state is not EngineState.RUNNING:
                return False
            finding = self._coroner.examine_template(error)
            if finding.error is not None:
                self._break(finding.error)
                return False
            self._notify(finding.notice)
        self._note_restart(finding.notice)
        return True

    def _note_restart(self, notice: str) -> None:
        self._metrics.note_restart()
        self._log(notice)

    def on_worker(self, worker: WorkerHandle) -> None:
        """Add a worker that has just started."""
        assert self._duty is not None
        assert self._plan is not None
        with self._dispatch_lock:
            if self._plan.settings != self._setup.plan:
                worker.follow(self._ledger.generation, self._plan.settings)
        self._duty.watch(worker)

    def on_worker_gone(self, worker: WorkerHandle) -> None:
        """Stop using a worker that is being replaced, and close it."""
        assert self._duty is not None
        self._duty.forget(worker)
        with self._dispatch_lock:  # so that no thread is sending it a task
            given_up = worker.close()
        del self._left_at[worker.serial]
        del given_up  # outside the lock: unmapping takes a while

    def _break(self, error: BaseException) -> None:
        with self._lock:
            if self._state in (EngineState.STARTING, EngineState.RUNNING):
                self._state = EngineState.BROKEN
                self._error = error
        os.eventfd_write(self._wake, 1)

    def _who(self, worker: WorkerHandle) -> str:
        return worker.describe(self._settings.num_workers, self._setup.plan.rank)

    def _describe(self, epoch: int, step: int) -> str:
        if (epoch, step) == _TRIAL:
            assert self._plan is not None
            return f"the trial batch, {describe_batch(self._plan.trial_epoch or 0, 0, self._indices(*_TRIAL))}"
        return describe_batch(epoch, step, self._indices(epoch, step))

    def _indices(self, epoch: int, step: int) -> list[int]:
        assert self._plan is not None
        if (epoch, step) == _TRIAL:
            epoch, step = self._plan.trial_epoch or 0, 0
        indices: list[int] = self._plan.batch(epoch, step).indices.tolist()
        return indices

    # Stopping ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all processes and threads and free all resources, within 5 s. Idempotent and thread-safe."""
        if os.getpid() != self._owner_pid:  # a fork of the trainer: processes and threads belong to the parent
            return
        with self._lock:
            if self._state is EngineState.CLOSED:
                return
            self._state = EngineState.CLOSED
        os.eventfd_write(self._wake, 1)
        self._pool.stop()
        with self._loop_lock:
            if self._duty is not None:
                self._duty.stop()  # without the dispatch lock, which a receiver thread may be waiting for
        with self._dispatch_lock:
            given_up = self._pool.close_processes()
            os.close(self._wake)
        with self._lock:
            ledger, self._ledger = self._ledger, Ledger(self._settings.limits)
            probed, self._probed = self._probed, None
        del ledger, probed, given_up  # outside the locks: the user's objects may have finalisers

    def __repr__(self) -> str:
        return f"<ProcessEngine {self._state.value}, {self._ledger!r}>"
