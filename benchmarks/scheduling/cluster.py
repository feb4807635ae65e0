"""A trainer that runs the real scheduler over simulated nodes, in virtual time.

    scheduler ──task──► worker ──batch──► the node's link ──► the trainer's link ──► scheduler ──► loop

The loop checks that it gets each batch once, and in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduling.agenda import Agenda
from scheduling.nodes import Nodes
from scheduling.settings import ClusterSettings
from scheduling.timed import TimedScheduler
from swift_loader.scheduler.actions import Action, Fail, GiveUp, Reap, Replace, Send
from swift_loader.scheduler.events import Event
from swift_loader.scheduler.in_flight_limit import InFlightLimit
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Delivered, Scheduler, SchedulerSettings
from swift_loader.scheduler.work import PlannedSource, PlannedWork, Work

__all__ = ["Cluster", "Outcome"]

_NUM_STEPS = 10**6
"""Of an epoch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a part of a run was like."""

    num_batches: int
    virtual_s: float
    waited_s: float
    """Virtual time in which the loop waited."""
    scheduler_s: float
    """Real time in the scheduler."""
    num_events: int
    """Events of workers, and batches that the loop took."""
    num_rebuilt: int
    """Tasks that were sent again."""

    @property
    def us_per_batch(self) -> float:
        """Microseconds of real time in the scheduler."""
        return self.scheduler_s / self.num_batches * 1e6

    @property
    def events_per_s(self) -> float:
        """What the scheduler handles in a second of real time."""
        return self.num_events / self.scheduler_s


class Cluster:
    """A trainer with its workers. `run` can be called again and again."""

    def __init__(self, settings: ClusterSettings, seed: int = 0) -> None:
        """Start all workers."""
        self._settings = settings
        self._agenda = Agenda()
        self.nodes = Nodes(settings, self._agenda, self._tell, seed)
        limit = InFlightLimit.of(None, settings.num_workers, in_order=settings.in_order)
        limits = Limits(limit.num_batches, limit.per_worker, 64, settings.in_order)
        scheduler = Scheduler(SchedulerSettings(limits, max_restarts=100, num_workers=settings.num_workers))
        scheduler.begin(PlannedSource(0, 0, lambda _: _NUM_STEPS), keeps_meaning=True)
        self._scheduler = TimedScheduler(scheduler)
        self._num_sent = self._num_planned = self._num_taken = 0
        self._taken: set[Work] = set()
        """Out of order: what the loop got."""
        self._asked_s: float | None = None
        """When the loop asked for a batch that it hasn't got; None: it is at a step."""
        self._waited_s = 0.0
        for worker_id in range(settings.num_workers):
            self.nodes.start(worker_id)
        self._agenda.after(0.0, self._ask)

    def run(self, num_batches: int, disturb: Callable[[int], None] | None = None) -> Outcome:
        """Let the loop take so many more batches.

        Args:
            num_batches: How many.
            disturb: Is called after each of them, with its number from 1 on.
        """
        before, stop = self._figures(), self._num_taken + num_batches
        while self._num_taken < stop:
            num_taken = self._num_taken
            self._agenda.step()
            if disturb is not None and self._num_taken > num_taken:
                disturb(num_batches - (stop - self._num_taken))
        figures = zip(self._figures(), before, strict=True)
        virtual_s, waited_s, scheduler_s, num_events, num_rebuilt = (now - then for now, then in figures)
        return Outcome(num_batches, virtual_s, waited_s, scheduler_s, int(num_events), int(num_rebuilt))

    def _figures(self) -> tuple[float, ...]:
        scheduler, num_rebuilt = self._scheduler, self._num_sent - self._num_planned
        return self._agenda.now_s, self._waited_s, scheduler.spent_s, scheduler.num_events, num_rebuilt

    def _tell(self, event: Event) -> None:
        self._carry_out(self._scheduler.handle(event, self._agenda.now_s))
        if self._asked_s is not None:
            self._ask()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._num_sent += 1
                    self._num_planned = max(self._num_planned, action.sequence + 1)
                    self.nodes.send(action)
                case Reap():
                    self.nodes.reap(action.worker)
                case Replace():
                    self.nodes.replace(action.worker_id)
                case Fail() | GiveUp():
                    raise RuntimeError(f"the scheduler gave up: {action}")

    def _ask(self) -> None:
        """Let the loop take a batch and go on to its step, or wait."""
        now_s = self._agenda.now_s
        asked_s = now_s if self._asked_s is None else self._asked_s
        delivered, actions = self._scheduler.take(now_s)
        if delivered is None:
            self._asked_s = asked_s
            return
        self._check(delivered)
        self._asked_s = None
        self._waited_s += now_s - asked_s
        self._num_taken += 1
        self._agenda.after(self._settings.step_s, self._ask)
        self._carry_out(actions)

    def _check(self, delivered: Delivered) -> None:
        expected = PlannedWork(*divmod(self._num_taken, _NUM_STEPS))
        if delivered.outcome != delivered.work or (self._settings.in_order and delivered.work != expected):
            raise RuntimeError(f"the loop got {delivered} instead of {expected}")
        if not self._settings.in_order:
            if delivered.work in self._taken:
                raise RuntimeError(f"the loop got {delivered} twice")
            self._taken.add(delivered.work)
