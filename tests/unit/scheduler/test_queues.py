"""Which worker gets the next task: the one with the least to do, as found by looking at all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from swift_loader.sampling.work import IndexWork, PlannedWork, StreamWork, Work
from swift_loader.scheduler.delivery import BatchState, Delivery
from swift_loader.scheduler.messages import Send
from swift_loader.scheduler.queues import MAX_TASKS, Limits, Worker, WorkerMove, Workers, WorkerState

NUM_IDS = 6

LIMITS = st.builds(
    Limits,
    max_in_flight=st.integers(1, 24),
    max_ready_per_worker=st.integers(1, 4),
    in_order=st.booleans(),
    num_expected=st.integers(0, 4),
)

WORKS = st.one_of(
    st.just(PlannedWork(0, 0)),
    st.builds(StreamWork, st.just(0), st.just(0), st.integers(0, NUM_IDS), st.just(0)),
    st.builds(IndexWork, st.just(0), st.just(0), st.just([1]), st.none() | st.integers(0, NUM_IDS)),
)

READY, VOID = Delivery(state=BatchState.READY), Delivery(state=BatchState.VOID)
WORK = PlannedWork(0, 0)


def scan(workers: Workers, limits: Limits, work: Work, max_ready: float) -> Worker | None:
    """Return the worker with the least to do, by looking at all of them. The reference."""
    worker_id, num_workers = None if isinstance(work, PlannedWork) else work.worker_id, len(list(workers))
    share = limits.share(num_workers) if num_workers >= limits.num_expected else 1
    loads = [
        (len(worker.tasks), worker.num_ready, worker.worker_id)
        for worker in workers
        if worker.state is WorkerState.READY
        and worker.num_ready < max_ready
        and worker.num_current < (worker.max_tasks if worker_id is None else MAX_TASKS)
        and worker.num_current < share
        and len(worker.tasks) < 1.5 * MAX_TASKS
        and worker_id in (None, worker.worker_id)
    ]
    least = min(loads, default=None)
    return next((worker for worker in workers if least is not None and worker.worker_id == least[2]), None)


class WorkersModel(RuleBasedStateMachine):
    """Workers come and go, get tasks and answer them; limits change; the loop takes batches and seeks."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = self.num_added = 0

    @initialize(limits=LIMITS, num_workers=st.integers(0, NUM_IDS))
    def begin_anew(self, limits: Limits, num_workers: int) -> None:
        self.limits, self.workers = limits, Workers(limits)
        for worker_id in range(num_workers):
            self.add(worker_id)

    def some(self, data: st.DataObject, which: Callable[[Worker], Any] = lambda _: True) -> Worker | None:
        found = list(filter(which, self.workers))
        return data.draw(st.sampled_from(found)) if found else None

    @rule(worker_id=st.integers(0, NUM_IDS - 1))
    def add(self, worker_id: int) -> None:
        if all(worker.worker_id != worker_id for worker in self.workers):
            self.workers.meet(self.num_added, worker_id).move(WorkerMove.READY)
            self.num_added += 1

    @rule(data=st.data(), move=st.sampled_from([WorkerMove.KILL, WorkerMove.DISCONNECT, WorkerMove.LEAVE]))
    def retire(self, data: st.DataObject, move: WorkerMove) -> None:
        if worker := self.some(data, lambda worker: worker.state is WorkerState.READY):
            worker.move(move)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if worker := self.some(data):
            self.workers.remove(worker)
            self.workers.remove(worker)

    @rule(work=WORKS, is_lost=st.booleans(), number=st.integers(0, 12))
    def give_tasks(self, work: Work, is_lost: bool, number: int) -> None:
        """As the ledger does: to the worker that was picked."""
        for left in reversed(range(number + 1)):
            max_ready = math.inf if is_lost else self.limits.max_ready_per_worker
            picked = self.workers.pick(work, is_lost=is_lost)
            assert picked is scan(self.workers, self.limits, work, max_ready)
            if picked is None:
                return
            if left:
                picked.push(Send(picked.serial, self.generation, 0, work))

    @rule(data=st.data(), build_s=st.none() | st.sampled_from([0.0, 1e-5, 1e-3, 0.5]), number=st.integers(1, 5))
    def answer(self, data: st.DataObject, build_s: float | None, number: int) -> None:
        for _ in range(number):
            if worker := self.some(data, lambda worker: worker.tasks):
                is_current = worker.tasks[0].generation == self.generation
                batch = data.draw(st.sampled_from([READY, VOID])) if is_current else None
                self.workers.pop(worker, batch, build_s, 0.0)

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        if worker := self.some(data, lambda worker: worker.num_ready):
            self.workers.note_delivered(worker.serial)

    @rule()
    def begin(self) -> None:
        self.workers.begin()
        self.generation += 1

    @rule(limits=LIMITS)
    def use_limits(self, limits: Limits) -> None:
        self.limits = limits
        for worker in self.workers:
            if worker.state is WorkerState.LEAVING:
                worker.move(WorkerMove.STAY)
        self.workers.use_limits(limits)


def test_in_any_interleaving_the_worker_is_the_one_that_a_scan_finds() -> None:
    how = settings(max_examples=40, stateful_step_count=60, derandomize=True, report_multiple_bugs=False)
    run_state_machine_as_test(WorkersModel, settings=how)


MANY = Limits(max_in_flight=1000, max_ready_per_worker=100, in_order=True)


def workers_of(num_workers: int, limits: Limits = MANY) -> Workers:
    """Return workers 0, 1, ...; the id of worker i is i."""
    workers = Workers(limits)
    for serial in range(num_workers):
        workers.meet(serial, worker_id=serial).move(WorkerMove.READY)
    return workers


def fill(workers: Workers, work: Work = WORK) -> list[int]:
    """Give tasks as long as there is room. Return who got them."""
    serials = list[int]()
    while (worker := workers.pick(work)) is not None:
        worker.push(Send(worker.serial, 0, 0, work))
        serials.append(worker.serial)
    return serials


def build(workers: Workers, *build_s: float) -> Workers:
    """Have worker 0 build batches, which the loop takes."""
    worker = workers.by_serial[0]
    for seconds in build_s:
        worker.push(Send(0, 0, 0, WORK))
        workers.pop(worker, READY, seconds, 0.0)
        workers.note_delivered(0)
    return workers


@given(num_workers=st.integers(1, 4), max_in_flight=st.integers(1, 12))
def test_tasks_are_spread_evenly_and_no_worker_gets_more_than_its_share(num_workers: int, max_in_flight: int) -> None:
    limits = replace(MANY, max_in_flight=max_in_flight)
    assert fill(workers_of(num_workers, limits)) == [*range(num_workers)] * min(2, limits.share(num_workers))


@pytest.mark.parametrize(
    ("build_s", "in_order", "num_tasks"),
    [
        ([], True, 2),
        ([1.0], True, 2),
        ([0.0001], True, 11),
        ([0.0], True, MAX_TASKS),
        ([0.1, 0.5], True, 1),
        ([0.1, 0.5], False, 2),
        ([0.1, 0.1, 0.1], True, 2),
    ],
)
def test_a_worker_has_a_millisecond_of_work_waiting_unless_its_times_vary(
    build_s: list[float], in_order: bool, num_tasks: int
) -> None:
    assert len(fill(build(workers_of(1, replace(MANY, in_order=in_order)), *build_s))) == num_tasks


@given(num_workers=st.integers(1, 4), max_in_flight=st.integers(1, 200))
def test_a_streams_batches_wait_at_their_worker_up_to_its_share(num_workers: int, max_in_flight: int) -> None:
    limits = replace(MANY, max_in_flight=max_in_flight)
    workers = build(workers_of(num_workers, limits), 0.1, 0.5)  # its times vary
    assert len(fill(workers, StreamWork(0, 0, 0, 0))) == min(MAX_TASKS, limits.share(num_workers))


@given(limits=st.builds(Limits, st.integers(1, 50), st.integers(1, 9), st.booleans()))
def test_the_batches_of_one_worker_are_limited_by_those_of_all(limits: Limits) -> None:
    for num_workers in range(5):
        assert 1 <= limits.share(num_workers) <= limits.max_in_flight
        assert limits.share(num_workers) * max(1, num_workers) <= max(limits.max_in_flight, num_workers)
        assert 1 <= limits.max_of_worker(num_workers) <= limits.max_in_flight
    assert limits.max_of_worker(1) == min(limits.max_in_flight, limits.max_ready_per_worker + MAX_TASKS)


@pytest.mark.parametrize(
    ("num_workers", "in_order", "num_batches"),
    [(0, True, 10), (3, True, 10), (4, True, 12), (64, True, 192), (5, False, 10), (6, False, 12), (64, False, 128)],
)
def test_every_worker_has_batches_to_build_and_in_order_one_more(
    num_workers: int, in_order: bool, num_batches: int
) -> None:
    assert Limits.of(None, None, num_workers, in_order=in_order).max_in_flight == num_batches
    assert Limits.of(3, None, 8, in_order=in_order) == Limits(3, 2, in_order)
