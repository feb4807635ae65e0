from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swift_loader.engine.ledger import MAX_TASKS, Assignment, Ledger, Limits
from swift_loader.errors import ProtocolError

Task = tuple[int, int]
"""(generation, sequence)."""

LIMITS = Limits(max_in_flight=4, max_ready_per_worker=3, max_tasks=10, in_order=True)


class LedgerModel(RuleBasedStateMachine):
    """Workers answer their tasks in order, in any interleaving; the loop takes batches and is sent elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[int, deque[Task]] = {}
        self.num_added = 0
        self.lost: set[Task] = set()
        self.ready: dict[Task, int] = {}
        self.generation = 0
        self.first = (0, 0)
        self.first_length = 0
        self.num_delivered = self.num_sent = 0
        self.left_in_epoch: set[tuple[int, int]] = set()

    @initialize(
        num_batches=st.integers(1, 9),
        max_in_flight=st.integers(1, 8),
        max_ready_per_worker=st.integers(1, 5),
        max_tasks=st.integers(1, 5),
        in_order=st.booleans(),
    )
    def begin(
        self, num_batches: int, max_in_flight: int, max_ready_per_worker: int, max_tasks: int, in_order: bool
    ) -> None:
        self.num_batches = self.first_length = num_batches
        self.limits = Limits(max_in_flight, max_ready_per_worker, max_tasks, in_order)
        self.ledger: Ledger[Task] = Ledger(self.limits)

    @property
    def position(self) -> tuple[int, int]:
        return self.where(self.num_delivered)

    def length(self, epoch: int) -> int:
        return self.first_length if epoch == self.first[0] else self.num_batches

    def where(self, sequence: int) -> tuple[int, int]:
        epoch, step = self.first
        for number in range(sequence + 1):
            step += number > 0
            while step >= self.length(epoch):
                epoch, step = epoch + 1, 0
        return epoch, step

    def current_tasks(self, worker: int) -> list[Task]:
        return [task for task in self.queues[worker] if task[0] == self.generation]

    @rule()
    def add_worker(self) -> None:
        if len(self.queues) < 4:
            index = self.num_added
            self.num_added += 1
            self.ledger.add_worker(index)
            self.queues[index] = deque()

    @rule(data=st.data())
    def worker_is_gone(self, data: st.DataObject) -> None:
        if not self.queues:
            return
        index = data.draw(st.sampled_from(sorted(self.queues)))
        lost = set(self.current_tasks(index))
        del self.queues[index]
        assert self.ledger.remove_worker(index) == len(lost)
        self.lost |= lost

    @rule()
    def assign(self) -> None:
        for task in self.ledger.assign():
            assert task.generation == self.generation
            if self.lost:  # in order, and before anything new
                assert (task.generation, task.sequence) == min(self.lost)
                self.lost.remove((task.generation, task.sequence))
            else:
                assert list(self.ready.values()).count(task.worker) < self.limits.max_ready_per_worker
                assert task.sequence == self.num_sent
                self.num_sent += 1
            assert (task.epoch, task.step) == self.where(task.sequence)
            assert (task.epoch, task.step) == self.ledger.locate(task.sequence)
            self.queues[task.worker].append((task.generation, task.sequence))

    @rule(data=st.data(), build_s=st.sampled_from([0.0, 1e-5, 1e-3, 0.5]))
    def answer(self, data: st.DataObject, build_s: float) -> None:
        busy = [index for index, queue in self.queues.items() if queue]
        if not busy:
            return
        index = data.draw(st.sampled_from(busy))
        task = self.queues[index].popleft()
        stale = task[0] != self.generation
        if stale and data.draw(st.booleans()):
            self.ledger.skip(index, task[0])
            return
        assert self.ledger.complete(index, *task, task, build_s) is not stale
        if not stale:
            self.ready[task] = index

    @rule(data=st.data())
    def answer_out_of_turn(self, data: st.DataObject) -> None:
        if not self.queues:
            return
        index = data.draw(st.sampled_from(sorted(self.queues)))
        due = self.queues[index][0] if self.queues[index] else None
        task = data.draw(st.tuples(st.integers(0, self.generation + 1), st.integers(0, 20)).filter(lambda t: t != due))
        with pytest.raises(ProtocolError):
            self.ledger.complete(index, *task, task, 0.1)
        if due is None or task[0] != due[0] or task[0] == self.generation:
            with pytest.raises(ProtocolError):
                self.ledger.skip(index, task[0])

    @rule()
    def deliver(self) -> None:
        had_one = self.ledger.has_deliverable
        delivered = self.ledger.deliver()
        assert (delivered is not None) == had_one
        if delivered is None:
            self.check_that_something_goes_on()
            return
        sequence, outcome = delivered
        assert outcome == (self.generation, sequence)
        del self.ready[outcome]
        if self.limits.in_order:
            assert sequence == self.num_delivered
        if not self.left_in_epoch:
            epoch, step = self.position
            self.left_in_epoch = {(epoch, later) for later in range(step, self.length(epoch))}
        self.left_in_epoch.remove(self.ledger.locate(sequence))
        self.num_delivered += 1

    def check_that_something_goes_on(self) -> None:
        self.assign()
        if self.queues and self.generation:
            assert any(self.queues.values()), "nothing is ready, and nobody has anything to do"

    @rule(epoch=st.integers(0, 3), step=st.integers(0, 8))
    def seek(self, epoch: int, step: int) -> None:
        self.go_to(epoch, step % (self.length(epoch) + 1))

    @rule()
    def seek_where_it_is(self) -> None:
        self.go_to(*self.position)

    @precondition(lambda self: self.num_delivered)
    @rule()
    def seek_to_the_next_epoch(self) -> None:
        self.go_to(self.position[0] + 1, 0)

    @rule(epoch=st.integers(0, 4), missing=st.integers(0, 8), data=st.data())
    def follow_another_plan(self, epoch: int, missing: int, data: st.DataObject) -> None:
        length = max(0, self.num_batches - missing)
        self.go_to(epoch, data.draw(st.integers(0, length)), length)

    def go_to(self, epoch: int, step: int, first_length: int | None = None) -> None:
        """Seek; with a length, under a new plan in which this epoch has so many batches."""
        is_new_plan = first_length is not None
        length = self.length(epoch) if first_length is None else first_length
        # In any order, the count that was delivered says where in the epoch the loop is only at its beginning.
        is_a_place = self.limits.in_order or not self.num_delivered or step == 0
        stays = bool(self.generation) and (epoch, step) == self.position and is_a_place and not is_new_plan
        lengths = {epoch: length}
        dropped = self.ledger.seek(
            epoch, step, lambda asked: lengths.get(asked, self.num_batches), is_new_plan=is_new_plan
        )
        if stays:
            assert dropped == []
            assert self.ledger.generation == self.generation
            return
        assert sorted(dropped) == sorted(self.ready)
        assert self.ledger.generation == self.generation + 1
        self.generation += 1
        self.first, self.first_length, self.num_delivered = (epoch, step), length, 0
        self.num_sent = 0
        self.ready.clear()
        self.lost.clear()
        self.left_in_epoch = set()

    @invariant()
    def nothing_is_over_its_limit(self) -> None:
        if not hasattr(self, "ledger"):
            return
        waiting = {index: len(self.current_tasks(index)) for index in self.queues}
        ready = {index: list(self.ready.values()).count(index) for index in self.queues}
        assert sum(waiting.values()) + len(self.ready) + len(self.lost) <= self.limits.max_in_flight
        for index, num_waiting in waiting.items():
            assert num_waiting <= self.limits.max_tasks
            if self.num_added == len(self.queues):  # else a worker may have taken on what another one lost
                assert num_waiting + ready[index] < self.limits.max_ready_per_worker + self.limits.max_tasks

    @invariant()
    def the_ledger_knows_where_everything_is(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.position == self.position
        assert self.ledger.num_ready == len(self.ready)
        if self.num_delivered:
            assert self.ledger.is_between_epochs == (self.position[1] == 0)
        for index, queue in self.queues.items():
            due = queue[0] if queue and queue[0][0] == self.generation else None
            assert self.ledger.building(index) == (self.ledger.locate(due[1]) if due else None)
        wanted = (self.generation, self.num_delivered)
        busy = [index for index in self.queues if self.current_tasks(index)]
        holders = [index for index in busy if wanted in self.queues[index]] if self.limits.in_order else busy
        assert sorted(self.ledger.awaited()) == sorted(holders)

    def teardown(self) -> None:
        """Whatever happened, the loop gets to the end of the epoch."""
        if not hasattr(self, "ledger") or not self.generation:
            return
        self.add_worker()
        epoch = self.position[0]
        for _ in range(1000):
            if self.position[0] != epoch:
                return
            self.deliver()
            for index, queue in self.queues.items():
                if queue:
                    task = queue.popleft()
                    if self.ledger.complete(index, *task, task, 0.1):
                        self.ready[task] = index
                    break
        pytest.fail("the epoch doesn't end")


def test_in_any_interleaving_batches_come_once_in_order_and_within_the_limits() -> None:
    run_state_machine_as_test(
        LedgerModel,
        settings=settings(max_examples=120, stateful_step_count=50, deadline=None),
    )


def ledger_with(num_workers: int, limits: Limits = LIMITS) -> Ledger[str]:
    ledger: Ledger[str] = Ledger(limits)
    for index in range(num_workers):
        ledger.add_worker(index)
    return ledger


def go_to(ledger: Ledger[str], epoch: int, step: int, num_batches: int = 10, *, is_new_plan: bool = False) -> list[str]:
    return ledger.seek(epoch, step, lambda _epoch: num_batches, is_new_plan=is_new_plan)


def answer(ledger: Ledger[str], task: Assignment, outcome: str = "batch", build_s: float = 0.1) -> bool:
    return ledger.complete(task.worker, task.generation, task.sequence, outcome, build_s)


def test_nothing_is_assigned_before_the_first_seek() -> None:
    assert ledger_with(2).assign() == []


def test_nothing_is_assigned_without_workers_and_the_loop_waits_for_nobody() -> None:
    ledger = ledger_with(0)
    go_to(ledger, 0, 3)
    assert ledger.assign() == []
    assert ledger.deliver() is None
    assert ledger.awaited() == []
    assert ledger.position == (0, 3)


def test_no_batches_are_never_assigned() -> None:
    ledger = ledger_with(2)
    assert go_to(ledger, 0, 0, num_batches=0) == []
    assert ledger.assign() == []
    assert ledger.deliver() is None


def test_batches_go_on_across_the_end_of_an_epoch() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 4, 1, num_batches=2)
    assert [(task.epoch, task.step) for task in ledger.assign()] == [(4, 1), (5, 0)]


def test_the_first_epoch_may_have_another_number_of_batches_than_the_later_ones() -> None:
    ledger = ledger_with(1, limits=Limits(20, 20, 20, in_order=True))
    ledger.seek(4, 1, lambda epoch: 3 if epoch == 4 else 2, is_new_plan=False)
    assert [ledger.locate(sequence) for sequence in range(6)] == [(4, 1), (4, 2), (5, 0), (5, 1), (6, 0), (6, 1)]


def test_the_rest_of_an_epoch_may_be_nothing() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 4, 2, num_batches=2)
    assert [(task.epoch, task.step) for task in ledger.assign()] == [(5, 0), (5, 1)]


def test_with_a_new_plan_nothing_that_is_in_flight_keeps_its_value() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    task = ledger.assign()[0]
    answer(ledger, task, "of the old plan")
    assert go_to(ledger, 0, 0) == []
    assert go_to(ledger, 0, 0, is_new_plan=True) == ["of the old plan"]
    assert ledger.generation == 2


def test_idle_workers_get_the_first_tasks() -> None:
    ledger = ledger_with(4)
    go_to(ledger, 0, 0)
    assert sorted(task.worker for task in ledger.assign()) == [0, 1, 2, 3]


def test_a_fast_worker_gets_more_tasks_ahead_than_a_slow_one() -> None:
    limits = Limits(max_in_flight=100, max_ready_per_worker=50, max_tasks=50, in_order=True)
    ahead = {}
    for build_s in (1e-4, 1.0):
        ledger = ledger_with(1, limits=limits)
        go_to(ledger, 0, 0)
        first, *rest = ledger.assign()
        answer(ledger, first, build_s=build_s)
        ahead[build_s] = len(rest) + len(ledger.assign())
    assert ahead[1e-4] > ahead[1.0] == 2


@pytest.mark.parametrize(("in_order", "num_waiting"), [(True, 0), (False, 1)])
def test_in_order_no_task_waits_at_a_worker_whose_batches_vary(in_order: bool, num_waiting: int) -> None:
    ledger = ledger_with(1, limits=Limits(100, 100, 10, in_order))
    go_to(ledger, 0, 0, num_batches=100)
    tasks = deque(ledger.assign())
    for build_s in (0.1, 0.2, 0.1, 0.2):
        answer(ledger, tasks.popleft(), build_s=build_s)
        tasks.extend(ledger.assign())
    assert len(tasks) == 1 + num_waiting
    for _ in range(30):
        answer(ledger, tasks.popleft(), build_s=0.15)
        tasks.extend(ledger.assign())
    assert len(tasks) == 2


@pytest.mark.parametrize("max_in_flight", [4, 5, 6, 7])
def test_no_task_waits_at_a_worker_while_it_takes_another_ones_only_task(max_in_flight: int) -> None:
    ledger = ledger_with(4, limits=Limits(max_in_flight, 4, 10, in_order=True))
    go_to(ledger, 0, 0, num_batches=100)
    assert sorted(task.worker for task in ledger.assign()) == [0, 1, 2, 3]


def test_a_worker_never_has_more_tasks_than_a_pipe_holds() -> None:
    limits = Limits(max_in_flight=10_000, max_ready_per_worker=10_000, max_tasks=10_000, in_order=True)
    ledger = ledger_with(1, limits=limits)
    num_sent = 0
    for epoch in range(20):
        go_to(ledger, epoch, 0)
        tasks = ledger.assign()
        num_sent += len(tasks)
        if epoch == 0:
            answer(ledger, tasks[0], build_s=0.0)
            num_sent += len(ledger.assign()) - 1
    assert MAX_TASKS <= num_sent <= 3 * MAX_TASKS


def test_in_completion_order_the_next_epoch_waits_for_the_last_batch_of_this_one() -> None:
    ledger = ledger_with(2, limits=Limits(4, 4, 4, in_order=False))
    go_to(ledger, 0, 0, num_batches=2)
    tasks = ledger.assign()
    slow, *others = [task for task in tasks if task.worker == tasks[0].worker]
    fast = [task for task in tasks if task.worker != slow.worker]
    for task in fast:
        answer(ledger, task)
    assert (fast[0].epoch, fast[1].epoch) == (0, 1)
    assert ledger.deliver() == (fast[0].sequence, "batch")
    assert ledger.deliver() is None
    assert ledger.awaited() == [slow.worker]
    answer(ledger, slow)
    assert ledger.deliver() == (slow.sequence, "batch")
    assert ledger.deliver() == (fast[1].sequence, "batch")
    assert len(others) == 1


def test_the_worker_the_loop_waits_for_is_the_one_with_the_next_batch() -> None:
    ledger = ledger_with(3)
    go_to(ledger, 0, 0)
    first, second, *_ = ledger.assign()
    assert ledger.awaited() == [first.worker]
    answer(ledger, first)
    ledger.deliver()
    assert ledger.awaited() == [second.worker]


def test_what_a_worker_had_in_its_hands_is_built_by_others_first() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    tasks = ledger.assign()
    answer(ledger, tasks[0])
    assert ledger.remove_worker(0) == len(tasks) - 1
    assert ledger.remove_worker(0) == 0
    assert ledger.building(0) is None
    assert ledger.awaited() == []
    assert ledger.deliver() == (0, "batch")
    ledger.add_worker(1)
    again = ledger.assign()
    assert [task.sequence for task in again[: len(tasks) - 1]] == [task.sequence for task in tasks[1:]]
    assert {task.worker for task in again} == {1}


def test_a_worker_with_enough_batches_ready_builds_what_was_lost_all_the_same() -> None:
    ledger = ledger_with(2, limits=Limits(8, 1, 1, in_order=True))
    go_to(ledger, 0, 0)
    first, second = ledger.assign()
    answer(ledger, second)
    assert ledger.assign() == []
    ledger.remove_worker(first.worker)
    assert [(task.worker, task.sequence) for task in ledger.assign()] == [(second.worker, first.sequence)]


def test_batches_of_a_generation_that_is_over_are_not_lost_with_a_worker() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    ledger.assign()
    go_to(ledger, 3, 0)
    assert ledger.remove_worker(0) == 0


def test_batches_that_were_ready_before_their_worker_died_are_delivered() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    for task in ledger.assign():
        answer(ledger, task, outcome=f"batch {task.step}")
    ledger.remove_worker(0)
    assert ledger.deliver() == (0, "batch 0")
    assert ledger.deliver() == (1, "batch 1")


@pytest.mark.parametrize("task", [(1, 1), (2, 0), (0, 0)])
def test_an_answer_out_of_turn_is_refused_and_changes_nothing(task: Task) -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    due = ledger.assign()[0]
    with pytest.raises(ProtocolError, match="worker 0 answered"):
        ledger.complete(0, task[0], task[1], "batch", 0.1)
    assert ledger.deliver() is None
    assert answer(ledger, due)


def test_a_task_of_the_current_generation_may_not_be_skipped() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    ledger.assign()
    with pytest.raises(ProtocolError, match="worker 0 skipped"):
        ledger.skip(0, 1)


def test_the_state_can_be_read() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    answer(ledger, ledger.assign()[0])
    assert repr(ledger) == "<Ledger generation 1, tasks sent: worker 0: 1, 1 ready>"
