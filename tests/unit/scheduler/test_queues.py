"""Which worker gets the next task: the one with the least to do, as found by looking at all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from swift_loader.errors import ProtocolError
from swift_loader.sampling.work import IndexWork, PlannedWork, StreamWork, Work
from swift_loader.scheduler.queues import MAX_TASKS, MIN_ENTRIES, Limits, Queue, Queues

NUM_IDS = 4

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


def scan(queues: Queues, is_open: set[int], limits: Limits, work: Work, max_ready: float) -> int | None:
    """Return the worker with the least to do, by looking at all of them. The reference."""
    worker_id = None if isinstance(work, PlannedWork) else work.worker_id
    num_workers = len(queues._queues)
    share = limits.share(num_workers) if num_workers >= limits.num_expected else 1
    loads = [
        (len(queue.tasks), queue.num_ready, queue.worker_id, serial)
        for serial, queue in queues._queues.items()
        if serial in is_open
        and queue.num_ready < max_ready
        and queue.num_current < (queue.max_tasks if worker_id is None else MAX_TASKS)
        and queue.num_current < share
        and len(queue.tasks) < 2 * MAX_TASKS
        and worker_id in (None, queue.worker_id)
    ]
    return min(loads)[3] if loads else None


class QueuesModel(RuleBasedStateMachine):
    """Workers come and go, get tasks and answer them; limits change; the loop takes batches and seeks."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = self.num_added = self.num_pushed = 0
        self.is_open: set[int] = set()

    @initialize(limits=LIMITS, num_workers=st.integers(0, 6))
    def begin_anew(self, limits: Limits, num_workers: int) -> None:
        self.limits = limits
        self.queues = Queues(limits)
        for worker_id in range(num_workers):
            self.add(worker_id % NUM_IDS)

    def some(self, data: st.DataObject, which: Callable[[Queue], bool] = lambda _: True) -> Queue | None:
        serials = [serial for serial, queue in self.queues._queues.items() if which(queue)]
        return self.queues._queues[data.draw(st.sampled_from(serials))] if serials else None

    @rule(worker_id=st.integers(0, NUM_IDS - 1))
    def add(self, worker_id: int) -> None:
        self.queues.add(self.num_added, worker_id)
        self.is_open.add(self.num_added)
        self.num_added += 1

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        if queue := self.some(data):
            self.queues.retire(queue.serial)
            self.is_open.discard(queue.serial)

    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        if queue := self.some(data):
            self.queues.reopen(queue.serial)
            self.is_open.add(queue.serial)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if queue := self.some(data):
            assert self.queues.remove(queue.serial) == list(queue.tasks)
            self.is_open.discard(queue.serial)

    @rule(work=WORKS, is_lost=st.booleans(), number=st.integers(1, 12))
    def give_tasks(self, work: Work, is_lost: bool, number: int) -> None:
        """As the ledger does: to the worker that was picked."""
        for _ in range(number):
            max_ready = math.inf if is_lost else self.limits.max_ready_per_worker
            picked = self.queues.pick(work, is_lost=is_lost)
            assert picked == scan(self.queues, self.is_open, self.limits, work, max_ready)
            if picked is None:
                return
            self.push(picked)

    @rule(data=st.data())
    def give_a_task_to_anybody(self, data: st.DataObject) -> None:
        if queue := self.some(data):
            self.push(queue.serial)

    def push(self, serial: int) -> None:
        self.queues.push(serial, (self.generation, self.num_pushed))
        self.num_pushed += 1

    @rule(data=st.data(), build_s=st.none() | st.sampled_from([0.0, 1e-5, 1e-3, 0.5]), number=st.integers(1, 5))
    def answer(self, data: st.DataObject, build_s: float | None, number: int) -> None:
        for _ in range(number):
            if queue := self.some(data, lambda queue: bool(queue.tasks)):
                task = queue.tasks[0]
                is_current = task[0] == self.generation
                self.queues.pop(queue.serial, task, is_current=is_current, is_ready=is_current, build_s=build_s)

    @rule(data=st.data())
    def answer_without_a_batch(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda queue: bool(queue.tasks)):
            task = queue.tasks[0]
            self.queues.pop(queue.serial, task, is_current=task[0] == self.generation)

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda queue: queue.num_ready > 0):
            self.queues.note_delivered(queue.serial)

    @rule()
    def begin(self) -> None:
        self.queues.begin()
        self.generation += 1

    @rule(limits=LIMITS)
    def use_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.queues.use_limits(limits)

    @rule(work=WORKS)
    def pick(self, work: Work) -> None:
        for is_lost, limit in ((False, self.limits.max_ready_per_worker), (True, math.inf)):
            assert self.queues.pick(work, is_lost=is_lost) == scan(self.queues, self.is_open, self.limits, work, limit)


def test_in_any_interleaving_the_worker_is_the_one_that_a_scan_finds() -> None:
    how = settings(max_examples=100, stateful_step_count=60, derandomize=True, report_multiple_bugs=False)
    run_state_machine_as_test(QueuesModel, settings=how)


def test_a_worker_that_has_less_to_do_again_and_again_leaves_no_old_entries() -> None:
    queues = queues_of(1, replace(MANY, max_ready_per_worker=2000))
    queues._queues[0].num_ready = 1000
    for _ in range(1000):
        queues.note_delivered(0)
    assert queues.pick(WORK) == 0
    assert len(queues._entries) <= 2 + MIN_ENTRIES


MANY = Limits(max_in_flight=1000, max_ready_per_worker=100, in_order=True)
WORK = PlannedWork(0, 0)


def queues_of(num_workers: int, limits: Limits = MANY) -> Queues:
    """Return queues of workers 0, 1, ...; the id of worker i is i."""
    queues = Queues(limits)
    for serial in range(num_workers):
        queues.add(serial, worker_id=serial)
    return queues


@given(num_workers=st.integers(1, 4), max_in_flight=st.integers(1, 12))
def test_tasks_are_spread_evenly_and_no_worker_gets_more_than_its_share(num_workers: int, max_in_flight: int) -> None:
    limits = replace(MANY, max_in_flight=max_in_flight)
    queues = queues_of(num_workers, limits)
    counts = [0] * num_workers
    while (serial := queues.pick(WORK)) is not None:
        assert counts[serial] == min(counts)
        queues.push(serial, (0, sum(counts)))
        counts[serial] += 1
    assert set(counts) == {min(2, limits.share(num_workers))}


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
    queues = queues_of(1, replace(MANY, in_order=in_order))
    for number, seconds in enumerate(build_s):
        queues.push(0, (0, number))
        queues.pop(0, (0, number), is_current=True, is_ready=True, build_s=seconds)
        queues.note_delivered(0)
    num_given = 0
    while (serial := queues.pick(WORK)) is not None:
        queues.push(serial, (0, num_given))
        num_given += 1
    assert num_given == num_tasks


@given(num_workers=st.integers(1, 4), max_in_flight=st.integers(1, 200))
def test_a_streams_batches_wait_at_their_worker_up_to_its_share(num_workers: int, max_in_flight: int) -> None:
    limits = replace(MANY, max_in_flight=max_in_flight)
    queues = queues_of(num_workers, limits)
    for build_s in (0.1, 0.5):  # its times vary
        queues.push(0, (0, 0))
        queues.pop(0, (0, 0), is_current=True, is_ready=True, build_s=build_s)
    turn = 0
    while queues.pick(StreamWork(0, turn, 0, turn)) == 0:
        queues.push(0, (0, turn))
        turn += 1
    assert turn == min(MAX_TASKS, limits.share(num_workers))


@given(st.lists(st.integers(0, 5), max_size=6))
def test_a_worker_answers_its_tasks_in_order(answers: list[int]) -> None:
    queues = queues_of(1)
    for number in range(4):
        queues.push(0, (7, number))
    first = 0
    for number in answers:
        assert queues.first(0) == ((7, first) if first < 4 else None)
        if number == first < 4:
            queues.pop(0, (7, number), is_current=True)
            first += 1
        else:
            with pytest.raises(ProtocolError, match=rf"worker 0 answered task \(7, {number}\), but its next task is"):
                queues.pop(0, (7, number), is_current=True)
    assert queues.remove(0) == [(7, number) for number in range(first, 4)]
    assert (queues.remove(0), queues.first(0), queues.pick(WORK), repr(queues)) == ([], None, None, "none")


def test_tasks_of_earlier_generations_stay_but_are_not_counted() -> None:
    queues = queues_of(2)
    queues.push(1, (0, 0))
    assert queues.busy() == [1]
    queues.begin()
    assert (queues.busy(), queues.first(1), repr(queues)) == ([], (0, 0), "worker 0: 0, worker 1: 1")


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
