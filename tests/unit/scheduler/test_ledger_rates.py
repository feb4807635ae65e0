"""How busy the ledger keeps workers: in virtual time, so that figures are exact and no process is needed."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.in_flight_limit import InFlightLimit
from swift_loader.scheduler.ledger import Ledger
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.work import PlannedSource

BATCH_SIZE = 32
SAMPLE_S = 0.002
OVERHEAD_S = 0.0003
"""From a worker's answer to the next batch, when no task waits."""

NUM_BATCHES = 3000


@dataclass(slots=True)
class VirtualRun:
    """Workers that take their time, and a loop that takes each batch at once."""

    num_workers: int
    limits: Limits
    slow_share: float
    """Of the samples, which take 50 times as long as others."""
    now_s: float = 0.0
    max_ready: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _events: list[tuple[float, int, Send, float]] = field(default_factory=list)
    _queues: dict[int, deque[Send]] = field(default_factory=dict)

    def rate(self) -> float:
        """Return batches per second."""
        ledger: Ledger[None] = Ledger(self.limits)
        for worker in range(self.num_workers):
            ledger.queues.add(worker, worker)
            self._queues[worker] = deque()
        ledger.begin(PlannedSource(0, 0, lambda _: 10**9), reuses_trial=False)
        self._send(ledger)
        num_delivered = 0
        while num_delivered < NUM_BATCHES:
            self.now_s, worker, task, build_s = heapq.heappop(self._events)
            ledger.complete(worker, task.generation, task.sequence, None, build_s)
            self._queues[worker].popleft()
            self._begin(worker)
            self._send(ledger)
            self.max_ready = max(self.max_ready, ledger.num_ready)
            while ledger.deliver() is not None:
                num_delivered += 1
                self._send(ledger)
        return num_delivered / self.now_s

    def _send(self, ledger: Ledger[None]) -> None:
        while (task := ledger.assign()) is not None:
            self._queues[task.worker].append(task)
            if len(self._queues[task.worker]) == 1:
                self._begin(task.worker)

    def _begin(self, worker: int) -> None:
        if self._queues[worker]:
            num_slow = sum(self._random.random() < self.slow_share for _ in range(BATCH_SIZE))
            build_s = SAMPLE_S * (BATCH_SIZE + 49 * num_slow) * self._random.uniform(1, 1.02)
            event = self.now_s + OVERHEAD_S + build_s, worker, self._queues[worker][0], build_s
            heapq.heappush(self._events, event)


def run_with(num_workers: int, slow_share: float, *, in_order: bool, queue_size: int | None = None) -> VirtualRun:
    in_flight = InFlightLimit.of(queue_size, num_workers, in_order=in_order)
    return VirtualRun(
        num_workers, Limits(in_flight.num_batches, in_flight.per_worker, 10, in_order=in_order), slow_share
    )


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16, 32, 64])
def test_even_samples_keep_all_workers_busy(num_workers: int, in_order: bool) -> None:
    ideal = num_workers / (BATCH_SIZE * SAMPLE_S * 1.01)
    assert run_with(num_workers, 0, in_order=in_order).rate() > 0.97 * ideal


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16, 32, 64])
def test_with_slow_samples_order_costs_little_speed_and_at_most_twice_the_memory(num_workers: int) -> None:
    in_order, as_ready = (run_with(num_workers, 0.05, in_order=in_order) for in_order in (True, False))
    assert in_order.rate() > 0.96 * as_ready.rate()
    assert in_order.limits.max_in_flight <= 2 * as_ready.limits.max_in_flight
    assert in_order.max_ready + num_workers <= 4 * max(num_workers, 5)


@pytest.mark.parametrize("queue_size", [8, 9, 10, 12, 15])
def test_even_samples_keep_all_workers_busy_with_hardly_more_batches_than_workers(queue_size: int) -> None:
    assert run_with(8, 0, in_order=True, queue_size=queue_size).rate() > 0.97 * 8 / (BATCH_SIZE * SAMPLE_S * 1.01)
