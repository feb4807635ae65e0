"""What the loop gets from a scheduler, and where in the work it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_loader.delivery.cursor import Cursor
from swift_loader.delivery.delivery import Delivery
from swift_loader.delivery.driver import Driver
from swift_loader.executors.base import Executor
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.scheduler import Scheduler
from swift_loader.scheduler.work import PlannedSource, WorkSource


class Deliveries:
    """Takes the batches that are ready, in the scheduler's order. Only the loop's thread uses it."""

    def __init__(self, driver: Driver, executor: Executor, scheduler: Scheduler) -> None:
        """Begin nowhere: `seek` or `begin` comes first. The driver's locks guard the scheduler."""
        self._driver = driver
        self._executor = executor
        self._scheduler = scheduler
        self._cursor: Cursor | None = None
        """None until the first `seek` or `begin`."""

    @property
    def may_begin_more(self) -> bool:
        """Whether the source of work may have more than when it was asked last, and there is room for it."""
        if self._cursor is None or not self._cursor.is_endless:
            return False
        with self._driver.lock:
            return self._scheduler.ledger.has_room

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last batch of a plan's epoch was taken."""
        return self._cursor is not None and self._cursor.is_between_epochs

    def seek(self, epoch: int, step: int, settings: PlanSettings) -> list[Any]:
        """Continue at this batch of this plan, and return the ready batches that nobody needs any more."""
        with self._driver.dispatch_lock, self._driver.lock:  # no task of the new plan may overtake it
            before, plan = self._cursor, self._executor.plan if self._cursor is None else self._cursor.plan
            is_same_plan = settings == plan.settings
            if before is not None and is_same_plan and before.is_at(epoch, step):
                return []
            plan = plan if is_same_plan else Plan.of(self._executor.plan.order.num_samples, settings)
            source = PlannedSource(epoch, step, plan.num_batches, plan.last_irregular_epoch)
            dropped = self._scheduler.begin(source, keeps_meaning=is_same_plan)
            self._executor.use_plan(self._scheduler.ledger.generation, plan)
            self._cursor = Cursor(plan, epoch, step, in_order=self._scheduler.limits.in_order)
        return dropped

    def begin(self, source: WorkSource, settings: PlanSettings, resume: Mapping[int, bytes] | None) -> list[Any]:
        """Deliver the work of this source, and return the ready batches that nobody needs any more."""
        with self._driver.dispatch_lock, self._driver.lock:
            plan = Plan.of(self._executor.plan.order.num_samples, settings)
            dropped = self._scheduler.begin(source, keeps_meaning=False)
            self._executor.use_plan(self._scheduler.ledger.generation, plan, resume)
            self._cursor = Cursor(plan, 0, 0, in_order=self._scheduler.limits.in_order, is_endless=True)
        return dropped

    def take(self) -> Delivery | None:
        """Return the next batch, or its error; None if it isn't ready.

        Raises `LoaderClosed` if the dispatcher was closed.
        """
        with self._driver.lock:
            self._driver.check_open()
            delivered = self._scheduler.take()
            if delivered is None:
                if self._driver.error is None and self._scheduler.ledger.is_exhausted:
                    return self._end()
                return None if self._driver.error is None else self.refuse(self._driver.error)
            assert self._cursor is not None
            work, outcome, error = delivered.work, delivered.outcome, delivered.error
            num_before = self._cursor.advance(work.epoch, work.step)
        if error is not None:
            if delivered.failures:  # all samples failed: the last one's error says more than the worker's traceback
                error.__cause__ = delivered.failures[-1].exception
            return Delivery(None, work.epoch, work.step, (), num_before, error, None, work)
        if outcome.lease is not None:
            outcome.lease.take()
        return Delivery(
            outcome.batch,
            work.epoch,
            work.step,
            delivered.failures,
            num_before,
            None,
            outcome.lease,
            work,
            outcome.state,
            arrival=outcome.arrival,
        )

    def _end(self) -> Delivery:
        """Return what says that the work has ended."""
        assert self._cursor is not None, "there was work"
        return Delivery(None, *self._cursor.position, num_before=self._cursor.num_delivered, is_end=True)

    def refuse(self, error: BaseException) -> Delivery:
        """Return a delivery with an error that is of no batch."""
        position = (0, 0) if self._cursor is None else self._cursor.position
        return Delivery(None, *position, error=error)
