"""What a batch costs the scheduler hardly depends on the number of workers: counted in lines of code, not in time."""

from __future__ import annotations

import sys
from collections import deque
from types import FrameType
from typing import Any

import pytest

from swift_loader.scheduler.actions import Action, Send
from swift_loader.scheduler.events import Built, Death, Disconnected, Ended, Ready
from swift_loader.scheduler.in_flight_limit import InFlightLimit
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings
from swift_loader.scheduler.work import PlannedSource

NUM_FEW, NUM_MANY = 16, 1024


class Loop:
    """Workers that answer in the order in which tasks were sent, and a loop that takes each batch at once."""

    def __init__(self, num_workers: int, *, in_order: bool) -> None:
        limit = InFlightLimit.of(None, num_workers, in_order=in_order)
        limits = Limits(limit.num_batches, limit.per_worker, 64, in_order)
        self.scheduler = Scheduler(SchedulerSettings(limits, max_restarts=3, num_workers=num_workers))
        self.scheduler.begin(PlannedSource(0, 0, lambda _: 10**6), keeps_meaning=True)
        self.tasks: deque[Send] = deque()
        self.num_taken = self.num_answered = 0
        for worker_id in range(num_workers):
            self.scheduler.handle(Ready(worker_id, worker_id), 0.0)
            self.decide()

    def decide(self) -> list[Action]:
        actions = self.scheduler.decide(0.0)
        self.tasks.extend(action for action in actions if isinstance(action, Send))
        return actions

    def answer(self) -> None:
        """Let the oldest task be answered."""
        task = self.tasks.popleft()
        self.num_answered += 1
        self.scheduler.handle(Built(task.worker, task.generation, task.sequence, None, 0.1), 0.0)
        self.decide()

    def run(self, num_batches: int) -> None:
        """Take so many batches."""
        for _ in range(num_batches):
            while self.scheduler.take() is None:
                self.answer()
            self.num_taken += 1
            self.decide()

    def lose(self, serial: int) -> list[Action]:
        """Have a worker die. Nobody replaces it."""
        self.scheduler.handle(Disconnected(serial, serial), 0.0)
        self.scheduler.handle(Ended(serial, serial, Death()), 0.0)
        self.tasks = deque(task for task in self.tasks if task.worker != serial)
        return self.decide()


class Lines:
    """Counts the lines of the package that are executed meanwhile."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if "swift_loader" not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self._trace


def num_lines(num_workers: int, num_dead: int, *, in_order: bool) -> float:
    """Return how many lines an answer and a delivery take."""
    loop = Loop(num_workers, in_order=in_order)
    loop.run(10 * num_workers)
    for serial in range(num_dead):
        loop.lose(serial)
    before = loop.num_taken + loop.num_answered
    with Lines() as lines:
        loop.run(200)
    return 2 * lines.count / (loop.num_taken + loop.num_answered - before)


@pytest.mark.parametrize("num_dead", [0, 10])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_takes_as_many_lines_with_many_workers_as_with_few(in_order: bool, num_dead: int) -> None:
    few, many = (num_lines(number, num_dead, in_order=in_order) for number in (NUM_FEW, NUM_MANY))
    assert 50 < many < 1.3 * few


def test_all_batches_of_many_workers_that_died_are_built_again_in_order() -> None:
    loop = Loop(NUM_MANY, in_order=True)
    for serial in range(0, NUM_MANY, 2):
        loop.lose(serial)
    loop.run(4 * NUM_MANY)
    assert loop.num_taken == 4 * NUM_MANY
    assert loop.scheduler.ledger.num_delivered == 4 * NUM_MANY
