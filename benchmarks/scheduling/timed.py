"""A scheduler whose time is measured, apart from that of whoever calls it."""

from __future__ import annotations

import time

from swift_loader.scheduler.actions import Action
from swift_loader.scheduler.events import Event
from swift_loader.scheduler.scheduler import Delivered, Scheduler

__all__ = ["TimedScheduler"]


class TimedScheduler:
    """Calls a scheduler as the driver does: after each event and each batch that the loop takes, it decides."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.spent_s = 0.0
        """Real time in the scheduler."""
        self.num_events = 0
        """Events of workers, and batches that the loop took."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Return what is to be done after an event."""
        begin_s = time.perf_counter()
        self._scheduler.handle(event, now_s)
        actions = self._scheduler.decide(now_s)
        self.spent_s += time.perf_counter() - begin_s
        self.num_events += 1
        return actions

    def take(self, now_s: float) -> tuple[Delivered | None, list[Action]]:
        """Return the next batch, if it is ready, and what is to be done then."""
        begin_s = time.perf_counter()
        delivered = self._scheduler.take()
        actions = [] if delivered is None else self._scheduler.decide(now_s)
        self.spent_s += time.perf_counter() - begin_s
        self.num_events += delivered is not None
        return delivered, actions
