"""The engine of worker processes.

    next_batch: deliver ◄──ready── complete ◄──batch── worker ◄──task── assign ◄── room
    (loop's thread)                (loop's thread while it waits, else receiver threads)

One lock guards the ledger and the state; decisions are made under it, and carried out after it was released. Tasks are
sent under a second lock, so that each worker gets them in the order in which they were decided. A third keeps it to one
thread at a time that waits for batches.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_loader.engine.base import Delivery
from swift_loader.engine.duty import Duty
from swift_loader.engine.failures import describe_batch, died, rebuild
from swift_loader.engine.ledger import Assignment, Ledger
from swift_loader.engine.pool import WorkerPool
from swift_loader.engine.worker import WorkerHandle
from swift_loader.errors import LoaderClosed, ProtocolError, SwiftLoaderError, WorkerStalled
from swift_loader.metrics import Metrics
from swift_loader.plan import Plan, PlanSettings
from swift_loader.transport.channel import Received
from swift_loader.transport.frames import Frame, Kind, unpack_frame
from swift_loader.transport.messages import Batch, Failure, Stage

__all__ = ["ProcessEngine"]

_PROBE = Assignment(worker=0, generation=0, sequence=0, epoch=0, step=0)


class EngineState(Enum):
    """NEW ─► STARTING ─► RUNNING ─► BROKEN; any of them ─► CLOSED."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    """A process is gone: what is ready is still delivered, then the error is raised, each time."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A worker's answer to a task: a batch, or why there is none."""

    batch: Any
    error: Exception | None


class ProcessEngine:
    """Batches from worker processes."""

    def __init__(self, pool: WorkerPool, metrics: Metrics, log: Callable[[str], None]) -> None:
        """Take over a pool, which is closed with the engine; its template may have been started."""
        self._pool = pool
        self._setup = pool.setup
        self._settings = settings = pool.settings
        self._metrics = metrics
        self._log = log
        self._owner_pid = os.getpid()
        self._state = EngineState.NEW
        self._error: BaseException | None = None
        # All reentrant: a signal handler or a finaliser may close the loader at any point of a thread that has them.
        self._lock = threading.RLock()
        """Guards the state, the error, the ledger and the trial batch."""
        self._dispatch_lock = threading.RLock()
        self._loop_lock = threading.RLock()
        """Held by the thread that waits for a batch."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable once the engine is broken or closed."""
        self._ledger: Ledger[_Outcome] = Ledger(settings.limits)
        self._plan: Plan | None = None
        self._duty: Duty | None = None
        self._probed: _Outcome | None = None

    @property
    def num_samples(self) -> int:
        """Length of the dataset, known once started."""
        assert self._plan is not None, "the engine hasn't started"
        return self._plan.order.num_samples

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start template and workers; returns when the dataset stands and, with `validate`, a trial batch has arrived.

        Raises:
            WorkerDied: A process ended.
            Exception: What building the dataset or the trial batch raised.
        """
        self._state = EngineState.STARTING
        try:
            num_samples = self._pool.start_template()
            if self._pool.reason_for_own_datasets:
                self._log(f"each worker builds its own dataset: {self._pool.reason_for_own_datasets}")
            self._plan = Plan.of(num_samples, self._setup.plan)
            self._pool.start_workers()
            self._duty = self._listen()
            if self._settings.validate and self.num_samples:
                self._await_probe()
            with self._lock:
                self._check_open()
            self._duty.hand_back()
        except BaseException:
            self.close()
            raise

    def _listen(self) -> Duty:
        self._pool.watch_template(self._on_template_death)
        workers = self._pool.workers
        groups = [[worker] for worker in workers] if self._settings.thread_per_worker else [workers]
        with self._lock:
            self._state = EngineState.RUNNING
        return Duty(groups, self._wake, self)

    def _await_probe(self) -> None:
        assert self._duty is not None
        with self._dispatch_lock:
            self._pool.workers[0].send(_PROBE, Kind.PROBE)
        while self._probed is None:
            self._duty.take().listen()
            with self._lock:
                self._check_open()
                if self._error is not None:
                    raise self._error
        probed, self._probed = self._probed, None  # and so the slot goes back
        if probed.error is not None:
            raise probed.error

    # The loop's side --------------------------------------------------------------------------------------------------

    def seek(self, epoch: int, step: int, plan: PlanSettings) -> None:
        """Make `next_batch` go on at this batch of this plan; free if that is where it is anyway."""
        assert self._plan is not None
        with self._dispatch_lock:  # no task of the new plan may overtake it
            with self._lock:
                is_new_plan = plan != self._plan.settings
                if is_new_plan:
                    self._plan = Plan.of(self.num_samples, plan)
                dropped = self._ledger.seek(epoch, step, self._plan.num_batches, is_new_plan=is_new_plan)
                generation = self._ledger.generation
            for worker in self._pool.workers if is_new_plan else ():
                worker.follow(generation, plan)
        del dropped  # outside the locks: the user's objects may have finalisers
        self._dispatch()

    def next_batch(self, timeout_s: float | None) -> Delivery:
        """Return the next batch; see `Engine.next_batch`."""
        entered_ns = time.perf_counter_ns()
        with self._loop_lock:
            try:
                num_ready, delivered = self._try_deliver()
                if delivered is None:
                    delivered = self._wait(timeout_s)
                self._dispatch()
                left_ns = time.perf_counter_ns()
                assert self._duty is not None
                self._duty.leave(entered_ns, left_ns)
            except Exception:
                raise
            except BaseException as interrupt:
                self._note_interrupt(interrupt)
                raise
        self._metrics.note_wait(left_ns - entered_ns, num_ready)
        epoch, step, outcome = delivered
        if outcome.error is not None:
            raise outcome.error
        return Delivery(outcome.batch, epoch, step)

    def _note_interrupt(self, interrupt: BaseException) -> None:
        """Refuse to go on after a Ctrl-C that came while a batch was being taken; harmless while waiting for one."""
        if self._duty is None or not self._duty.is_resting:
            self._break(
                SwiftLoaderError(
                    f"the loop was interrupted ({type(interrupt).__name__}) while it took a batch, which may be lost; "
                    f"make a new loader to go on"
                )
            )

    def _wait(self, timeout_s: float | None) -> tuple[int, int, _Outcome]:
        """Listen to the workers until the next batch is here."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        assert self._duty is not None
        listening = self._duty.take()
        while True:
            _, delivered = self._try_deliver()
            if delivered is not None:
                return delivered
            self._dispatch()
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise self._stalled(timeout_s)
            listening.listen(left_s)

    def _try_deliver(self) -> tuple[int, tuple[int, int, _Outcome] | None]:
        """Return how many batches are ready, and the next one if it is among them.

        Raises:
            LoaderClosed: The engine was closed.
            WorkerDied: The next batch isn't ready, and never will be.
        """
        with self._lock:
            self._check_open()
            num_ready = self._ledger.num_ready
            delivered = self._ledger.deliver()
            if delivered is not None:
                sequence, outcome = delivered
                return num_ready, (*self._ledger.locate(sequence), outcome)
            if self._error is not None:
                raise self._error
            return num_ready, None

    def is_ready(self) -> bool:
        """Return whether `next_batch` would return at once."""
        with self._lock:
            return self._ledger.has_deliverable

    def _dispatch(self) -> None:
        """Send out whatever tasks there is room for."""
        with self._dispatch_lock:
            with self._lock:
                assignments = self._ledger.assign() if self._state is EngineState.RUNNING else []
            for assignment in assignments:
                self._pool.workers[assignment.worker].send(assignment)

    def _check_open(self) -> None:
        if self._state is EngineState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one to go on")

    def _stalled(self, timeout_s: float | None) -> WorkerStalled:
        index, (epoch, step) = self._ledger.awaited()
        who = "no worker was ready" if index is None else f"{self._who(index)} has it"
        return WorkerStalled(
            f"no batch within timeout={timeout_s} s: the loop waits for {self._describe(epoch, step)}; {who}. Raise "
            f"timeout if such batches take that long, else look at what the dataset waits for"
        )

    # The listener's side ----------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerHandle, received: Received) -> None:
        """Take in one message. Runs on the thread that listens."""
        frame = unpack_frame(received.data)
        if frame.kind is Kind.SEGMENT:
            worker.add_segment(frame, received.descriptors)
            return
        if frame.kind is Kind.BATCH:
            self._take_batch(worker, Batch.unpack(frame))
        elif frame.kind is Kind.FAILURE:
            self._take_failure(worker, Failure.unpack(frame))
        else:
            self._take_note(worker, frame)

    def on_pause(self) -> None:
        """Send out tasks, after a receiver thread has taken in what was there."""
        self._dispatch()

    def _take_batch(self, worker: WorkerHandle, batch: Batch) -> None:
        with self._lock:
            wanted = batch.generation in (0, self._ledger.generation)
        started_ns = time.perf_counter_ns()
        if wanted:
            try:
                outcome = _Outcome(worker.read(batch), None)
            except Exception as error:  # raised by `next`, where the batch would have been
                outcome = _Outcome(None, error)
        else:
            worker.discard(batch)
            outcome = _Outcome(None, None)
        self._metrics.note_batch(batch, time.perf_counter_ns() - started_ns)
        build_s = (batch.fetch_ns + batch.collate_ns + batch.encode_ns) / 1e9
        self._complete(worker, batch.generation, batch.sequence, outcome, build_s)

    def _take_failure(self, worker: WorkerHandle, failure: Failure) -> None:
        if failure.stage is Stage.BUILD:
            self._break(rebuild(failure, self._who(worker.index), self._pool.definitions))
            return
        with self._lock:
            current = failure.generation == self._ledger.generation and failure.generation > 0
            epoch, step = self._ledger.locate(failure.sequence) if current else (0, 0)
        where = f", {self._describe(epoch, step)}" if current else ", while trying out the dataset's first samples"
        error = rebuild(failure, self._who(worker.index), self._pool.definitions, where)
        self._complete(worker, failure.generation, failure.sequence, _Outcome(None, error), 0.0)

    def _complete(
        self, worker: WorkerHandle, generation: int, sequence: int, outcome: _Outcome, build_s: float
    ) -> None:
        with self._lock:
            if generation == 0:
                self._probed = outcome
            else:
                self._ledger.complete(worker.index, generation, sequence, outcome, build_s)

    def _take_note(self, worker: WorkerHandle, frame: Frame) -> None:
        with self._lock:
            if frame.kind is Kind.READY:
                self._ledger.add_worker(worker.index)
            elif frame.kind is Kind.SKIPPED:
                self._ledger.skip(worker.index, frame.generation)
            else:
                raise ProtocolError(f"{self._who(worker.index)} sent {frame.kind.name}")

    def on_end(self, worker: WorkerHandle, error: Exception | None) -> None:
        """Take note that a worker is gone, or that what it said made no sense. Runs on the thread that listens."""
        with self._lock:
            if self._state is not EngineState.RUNNING:
                return
        exit_code = worker.process.wait_exit_code() if error is None else None
        with self._lock:
            building = self._ledger.building(worker.index)
            lost = self._ledger.remove_worker(worker.index)
        if error is None:
            at_work = f"it was building {self._describe(*building)}, and " if building else ""
            error = died(self._who(worker.index), exit_code, f"{at_work}{len(lost)} batches in its hands are lost")
        self._break(error)

    def _on_template_death(self, error: BaseException) -> None:
        """Take note that the template is gone; the workers have gone with it. Runs on the template's thread."""
        self._break(error)

    def on_failure(self, error: BaseException) -> None:
        """Take note that a receiver thread has ended by an error. Runs on that thread."""
        self._break(error)

    def _break(self, error: BaseException) -> None:
        with self._lock:
            if self._state is EngineState.RUNNING:
                self._state = EngineState.BROKEN
                self._error = error
        os.eventfd_write(self._wake, 1)

    def _who(self, index: int) -> str:
        return self._pool.workers[index].describe(self._settings.num_workers, self._setup.plan.rank)

    def _describe(self, epoch: int, step: int) -> str:
        assert self._plan is not None
        return describe_batch(epoch, step, self._plan.batch(epoch, step).indices.tolist())

    # Stopping ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all processes and threads and give everything back, within 5 s. Idempotent, from any thread."""
        if os.getpid() != self._owner_pid:  # a fork of the trainer: processes and threads are the parent's
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
            self._pool.close_templates()
        with self._dispatch_lock:
            self._pool.close_workers()
            os.close(self._wake)
        with self._lock:
            ledger, self._ledger = self._ledger, Ledger(self._settings.limits)
        del ledger  # outside the lock, with what was ready in it: the user's objects may have finalisers

    def __repr__(self) -> str:
        return f"<ProcessEngine {self._state.value}, {self._ledger!r}>"
