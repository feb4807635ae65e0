"""Hands the batches of a scheduler and its executor to the loop.

    driver: executor ──events──► scheduler ──actions──► executor    on the thread that leads
                                     │
    next_batch ◄──────────── take ───┘                              on the loop's thread

See `receivers` for the thread that leads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from swift_loader.delivery.deliveries import Deliveries
from swift_loader.delivery.delivery import Delivery
from swift_loader.delivery.driver import Driver
from swift_loader.delivery.phase import Phase
from swift_loader.delivery.receivers import Receivers
from swift_loader.delivery.trial import try_out
from swift_loader.errors import SwiftLoaderError
from swift_loader.executors.base import Executor
from swift_loader.metrics.metrics import Metrics
from swift_loader.sampling.plan import NO_SKIPS, PlanSettings, Skips
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Scheduler, SchedulerState
from swift_loader.scheduler.work import PlannedWork, WorkSource
from swift_loader.transport.descriptors import explaining_limits

LOOP_LIMIT_S = 2.0
"""How long `close` waits for the loop's thread to leave `next_batch`."""

DISPATCH_LIMIT_S = 1.0
"""How long `close` waits for a thread to carry out its actions."""


class Dispatcher:
    """The batches of one executor, in the order that its scheduler decides."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        metrics: Metrics,
        on_restart: Callable[[str], None],
    ) -> None:
        """Make a dispatcher that isn't started. It owns the executor and the scheduler.

        `on_restart` gets the warning about a process that is replaced, on any thread.
        """
        self._driver = Driver(executor, scheduler, on_restart)
        self._executor = executor
        self._scheduler = scheduler
        """Guarded by the driver's lock, apart from the watchdog and the number of ready batches for the metrics."""
        self._metrics = metrics
        self._loop_lock = threading.RLock()
        """Held by the thread that waits for a batch. Reentrant, like the driver's locks."""
        self._deliveries = Deliveries(self._driver, executor, scheduler)
        self._receivers: Receivers | None = None
        """None until `start`. Guarded by `_loop_lock`."""
        self._grace_s = 0.0
        """Seconds that replacing a worker may take. Set by `start`."""
        self._phase = Phase.WAITING
        """Only the loop's thread writes it. Others read it, with the loop lock."""

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
        with self._driver.lock:
            return self._scheduler.ledger.queues.fastest_build_s

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self, *, tries_out: bool, keeps_trial: bool, skips: Skips = NO_SKIPS) -> None:
        """Get ready to build batches. Blocks until the dataset is built. If it raises, it leaves nothing behind.

        `tries_out`: wait for a trial batch. `keeps_trial`: the loop may get it as its first one. `skips`: what it must
        not contain. Raises `WorkerDied`, or what building the dataset or the trial batch raised.
        """
        try:
            with explaining_limits():
                self._executor.start()
                with self._loop_lock:  # a thread that closes the dispatcher waits until the inbox isn't in use
                    with self._driver.lock:
                        self._driver.check_open()
                    self._begin(self._executor.plan.trial(skips) if tries_out else None, keeps_trial=keeps_trial)
        except BaseException:
            self.close()
            raise

    def _begin(self, trial: tuple[int, int] | None, *, keeps_trial: bool) -> None:
        """Begin to receive, once the executor has started. `trial`: epoch and step of the trial batch, if any."""
        self._grace_s = self._executor.grace_s
        receivers = self._receivers = Receivers(
            self._executor.inboxes, self._driver.receive_and_act, self._driver.fail, self._hand_over_if_idle
        )
        receivers.begin()
        if trial is not None:
            try_out(self._driver, receivers.take(), PlannedWork(*trial), self._grace_s, keeps_trial=keeps_trial)
        with self._driver.lock:
            self._driver.check_open()
        receivers.hand_over()

    # The loop's side --------------------------------------------------------------------------------------------------

    def seek(self, epoch: int, step: int, plan: PlanSettings) -> None:
        """Make `next_batch` continue at this batch of this plan. Costs nothing if it is there already."""
        if self._executor.owner is not None:
            self._executor.owner.check()
        self._metrics.end_pass()
        self._phase = Phase.TAKING
        try:
            dropped = self._deliveries.seek(epoch, step, plan)
            self._driver.act()
        except BaseException as interrupt:
            self._note_interrupt(interrupt)
            raise
        self._phase = Phase.IDLE
        del dropped  # outside the locks: the user's objects may have finalisers

    def begin(self, source: WorkSource, settings: PlanSettings, resume: Mapping[int, bytes] | None = None) -> None:
        """Make `next_batch` deliver this work, and nothing that was handed out before.

        `source` hands out the work, on any thread. It may say that there is none, and have more later: `next_batch`
        asks it again. `settings`: what workers know about the work; the order's seed is the base seed of torch's
        workers. `resume`: where each worker's dataset continues, by the worker's id: a packed `Resume`. The others
        begin anew.
        """
        if self._executor.owner is not None:
            self._executor.owner.check()
        self._metrics.end_pass()
        self._phase = Phase.TAKING
        try:
            dropped = self._deliveries.begin(source, settings, resume)
            self._driver.act()
        except BaseException as interrupt:
            self._note_interrupt(interrupt)
            raise
        self._phase = Phase.IDLE
        del dropped  # outside the locks, as in `seek`

    def end_pass(self) -> None:
        """Record that the loop met the end of its pass. Loop's thread."""
        self._metrics.end_pass(time.perf_counter_ns())

    def hand_out(self) -> None:
        """Hand out what the source of work has got since. Any thread."""
        self._driver.act()

    def next_batch(self) -> Delivery:
        """Return the next batch, or the error in its place; after an epoch, the next epoch's first batch. Blocks.

        If the source of work has ended, so that there is no batch to wait for, the delivery says so.

        Errors of the batch or the executor are returned, not raised: `WorkerStalled`, `WorkerDied`, `LoaderClosed`, and
        what the user's code raised. So any exception that is raised comes from a signal handler and says nothing about
        the batch. If it interrupted something that can't be repeated, there are no more batches afterwards.

        The caller makes sure that this process isn't a fork of the one that started the executor.
        """
        assert self._receivers is not None
        entered_ns = time.perf_counter_ns()
        with self._loop_lock:
            try:
                if self._phase is not Phase.IDLE:
                    self._driver.act()
                    if self._phase is Phase.BROKEN and self._driver.error is not None:
                        return self._deliveries.refuse(self._driver.error)
                self._metrics.note_asked(entered_ns)
                self._phase = Phase.TAKING
                num_ready = self._scheduler.ledger.num_ready
                delivery = self._deliveries.take() or self._wait()
                self._driver.act()
                left_ns = time.perf_counter_ns()
                self._receivers.leave(
                    entered_ns, left_ns, is_epoch_over=self._deliveries.is_between_epochs or delivery.is_end
                )
                delivery.number = self._metrics.note_delivery(delivery.arrival, entered_ns, left_ns, num_ready)
                self._phase = Phase.IDLE
            except SwiftLoaderError as error:  # our own error: signal handlers don't raise these
                return self._deliveries.refuse(error)
            except BaseException as interrupt:
                self._note_interrupt(interrupt)
                raise
        return delivery

    def _wait(self) -> Delivery:
        """Receive until the next batch has arrived."""
        assert self._receivers is not None
        did_lead = self._receivers.loop_leads
        inbox = self._receivers.take()
        with self._driver.lock:
            self._scheduler.watchdog.begin(time.monotonic(), self._grace_s)
        delivery = None if did_lead else self._deliveries.take()  # the threads may have received it until now
        if delivery is None and self._deliveries.may_begin_more:
            self._driver.act()
        while delivery is None:
            self._phase = Phase.WAITING
            self._driver.receive_or_judge(inbox)
            self._phase = Phase.TAKING
            delivery = self._deliveries.take()
            if delivery is None:
                self._driver.act()
                delivery = self._take_error()
        return delivery

    def _take_error(self) -> Delivery | None:
        """Return the error if there are no more batches than those that are ready, and none is ready."""
        return None if self._driver.error is None else self._deliveries.take()

    def is_ready(self) -> bool:
        """Return whether `next_batch` would return without blocking. Receives what has arrived. Loop's thread.

        Raises what a signal handler raised meanwhile, see `next_batch`.
        """
        with self._loop_lock:
            before, self._phase = self._phase, Phase.WAITING
            try:
                is_ready = self._driver.has_deliverable() or self._receive_what_is_here()
                self._phase = before
                return is_ready
            except SwiftLoaderError as error:  # our own, as in `next_batch`, which raises it
                self._driver.fail(error)
                return False
            except BaseException as interrupt:
                self._note_interrupt(interrupt)
                raise

    def _receive_what_is_here(self) -> bool:
        """Receive until the next batch is here, or nothing more is. Return whether it is."""
        if self._receivers is None or not self._receivers.loop_leads:  # the threads have received what was there
            return False
        inbox = self._receivers.take()
        while self._driver.receive(inbox, 0):
            self._phase = Phase.TAKING
            self._driver.act()
            self._phase = Phase.WAITING
            if self._driver.has_deliverable():
                return True
        return False

    def _note_interrupt(self, interrupt: BaseException) -> None:
        """Deliver no more batches if the interrupt came while one was taken. It is harmless during a wait.

        An interrupt is Ctrl-C or any other exception of a signal handler.
        """
        is_receiving = self._receivers is not None and self._receivers.inbox.is_taking_in
        if self._phase is Phase.TAKING or is_receiving:
            self._phase = Phase.BROKEN if self._phase is Phase.TAKING else Phase.WAITING
            error = SwiftLoaderError(
                f"the loop was interrupted ({type(interrupt).__name__}) while it took a batch, so a batch may be lost; "
                f"make a new loader"
            )
            error.__cause__ = interrupt
            self._driver.fail(error)

    def _hand_over_if_idle(self) -> None:
        """Have the threads receive if the loop is elsewhere. Any thread."""
        if self._loop_lock.acquire(blocking=False):
            try:
                if self._phase is Phase.IDLE and self._receivers is not None:
                    self._receivers.hand_over()
            finally:
                self._loop_lock.release()

    # Another number of workers ----------------------------------------------------------------------------------------

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Have so many workers from now on, at least 1. Returns before they have started or ended. Any thread.

        `limits`: for so many workers. Raises `LoaderClosed`, or `RuntimeError` if the number can't change; nothing has
        changed then.
        """
        if self._executor.owner is not None:
            self._executor.owner.check()
        with self._driver.dispatch_lock:
            with self._driver.lock:
                self._driver.check_open()
            self._executor.resize(num_workers, limits)
            if self._receivers is not None:
                self._receivers.add(self._executor.inboxes)
            self._act_on_resize(num_workers, limits)
        self._hand_over_if_idle()  # nobody may be listening to the workers that come and go

    def _act_on_resize(self, num_workers: int, limits: Limits) -> None:
        try:
            with self._driver.lock:
                self._scheduler.resize(num_workers, limits)
            self._driver.act()
        except BaseException as interrupt:  # some may have been started, and others not
            error = SwiftLoaderError(f"resize({num_workers}) was interrupted by {interrupt!r}; make a new loader")
            error.__cause__ = interrupt
            self._driver.fail(error)
            raise

    # Stopping ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all processes and threads and free all resources, within 5 s. Idempotent and thread-safe."""
        owner = self._executor.owner
        if owner is not None and not owner.is_here():  # a fork of the trainer: processes and threads are the parent's
            return
        with self._driver.lock:
            if self._scheduler.state is SchedulerState.CLOSED:
                return
            dropped = self._scheduler.close()
        self._executor.stop()
        # With limits: the loop's thread may be building a batch itself, which nobody can end. And a signal handler may
        # close the loader on a thread that holds a lock, for which the holder of the other one waits.
        with _held(self._loop_lock, LOOP_LIMIT_S):
            if self._receivers is not None:
                self._receivers.stop()  # without the dispatch lock, which a receiver thread may be waiting for
        with _held(self._driver.dispatch_lock, DISPATCH_LIMIT_S):
            garbage = self._executor.close()
        del dropped, garbage  # outside the locks: the user's objects may have finalisers

    def __repr__(self) -> str:
        return f"<Dispatcher {self._scheduler!r}, {self._executor!r}>"


@contextmanager
def _held(lock: threading.RLock, limit_s: float) -> Iterator[None]:
    """Hold a lock, or go on without it after `limit_s`."""
    is_held = lock.acquire(timeout=limit_s)
    try:
        yield
    finally:
        if is_held:
            lock.release()
