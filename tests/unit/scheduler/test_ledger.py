from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.batches import BATCH_STATES, BatchMove, BatchState
from swift_loader.scheduler.ledger import Ledger
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.work import IndexSource, IndexWork, PlannedSource, PlannedWork, StreamWork
from swift_loader.scheduler.worker_queue import MAX_TASKS
from tests.unit.scheduler.streams import StreamSource

Task = tuple[int, int]
"""(generation, sequence)."""

LIMITS = Limits(max_in_flight=4, max_ready_per_worker=3, max_tasks=10, in_order=True)


def assign(ledger: Ledger[Any]) -> list[Send]:
    """Return all tasks for which there is room."""
    return list(iter(ledger.assign, None))


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
        self.retired: set[int] = set()

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
            self.ledger.queues.add(index, index)
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

    @rule(data=st.data())
    def worker_gets_no_more(self, data: st.DataObject) -> None:
        if self.queues:
            index = data.draw(st.sampled_from(sorted(self.queues)))
            self.ledger.queues.retire(index)
            self.retired.add(index)

    @rule()
    def assign(self) -> None:
        for task in assign(self.ledger):
            assert task.worker not in self.retired
            assert task.generation == self.generation
            if self.lost:  # in order, and before anything new
                assert (task.generation, task.sequence) == min(self.lost)
                self.lost.remove((task.generation, task.sequence))
            else:
                assert list(self.ready.values()).count(task.worker) < self.limits.max_ready_per_worker
                assert task.sequence == self.num_sent
                self.num_sent += 1
            assert task.work == PlannedWork(*self.where(task.sequence))
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
        had_one = self.ledger.next_deliverable() is not None
        delivered = self.ledger.deliver()
        assert (delivered is not None) == had_one
        if delivered is None:
            self.check_that_something_goes_on()
            return
        sequence = delivered.sequence
        assert delivered.answer == (self.generation, sequence)
        assert delivered.state is BatchState.GONE
        del self.ready[delivered.answer]
        if self.limits.in_order:
            assert sequence == self.num_delivered
        if not self.left_in_epoch:
            epoch, step = self.position
            self.left_in_epoch = {(epoch, later) for later in range(step, self.length(epoch))}
        self.left_in_epoch.remove(self.where(sequence))
        assert delivered.work == PlannedWork(*self.where(sequence))
        self.num_delivered += 1

    def check_that_something_goes_on(self) -> None:
        self.assign()
        if self.queues.keys() - self.retired and self.generation:
            assert any(self.queues.values()), "nothing is ready, and nobody has anything to do"

    @rule(epoch=st.integers(0, 3), step=st.integers(0, 8), missing=st.integers(0, 8))
    def seek(self, epoch: int, step: int, missing: int) -> None:
        """Begin at a batch of an epoch, which may have fewer batches than the later ones."""
        length = max(0, self.num_batches - missing)
        step %= length + 1
        lengths = {epoch: length}
        source = PlannedSource(epoch, step, lambda asked: lengths.get(asked, self.num_batches))
        dropped = [batch.answer for batch in self.ledger.begin(source, reuses_trial=True)]
        assert dropped == list(self.ready)
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
            assert num_waiting <= self.limits.max_in_flight
            if self.num_added == len(self.queues):  # else a worker may have taken on what another one lost
                assert num_waiting + ready[index] < self.limits.max_ready_per_worker + self.limits.max_tasks

    @invariant()
    def the_ledger_knows_where_everything_is(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.num_delivered == self.num_delivered
        assert self.ledger.num_ready == len(self.ready)
        assert [batch.answer for batch in self.ledger.ready()] == list(self.ready)
        if self.generation:
            assert not self.ledger.is_exhausted
        if self.generation and self.limits.in_order:
            assert self.ledger.head() == PlannedWork(*self.position)
        for index, queue in self.queues.items():
            due = queue[0] if queue and queue[0][0] == self.generation else None
            assert self.ledger.work_of(index) == (PlannedWork(*self.where(due[1])) if due else None)
        wanted = (self.generation, self.num_delivered)
        busy = [index for index in self.queues if self.current_tasks(index)]
        is_held_by_one = self.limits.in_order and wanted not in self.lost
        holders = [index for index in busy if wanted in self.queues[index]] if is_held_by_one else busy
        assert sorted(self.ledger.awaited()) == sorted(holders)

    def teardown(self) -> None:
        """Whatever happened, the loop gets to the end of the epoch."""
        if not hasattr(self, "ledger") or not self.generation:
            return
        index = self.num_added
        self.ledger.queues.add(index, index)
        self.queues[index] = deque()
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
        ledger.queues.add(index, worker_id=index)
    return ledger


def go_to(ledger: Ledger[str], epoch: int, step: int, num_batches: int = 10) -> list[str | None]:
    dropped = ledger.begin(PlannedSource(epoch, step, lambda _: num_batches), reuses_trial=True)
    return [batch.answer for batch in dropped]


def deliver(ledger: Ledger[str]) -> tuple[int, str | None] | None:
    batch = ledger.deliver()
    return None if batch is None else (batch.sequence, batch.answer)


def answer(ledger: Ledger[str], task: Send, outcome: str = "batch", build_s: float = 0.1) -> bool:
    return ledger.complete(task.worker, task.generation, task.sequence, outcome, build_s)


def test_nothing_is_assigned_before_the_first_seek() -> None:
    assert assign(ledger_with(2)) == []


def test_nothing_is_assigned_without_workers_and_the_loop_waits_for_nobody() -> None:
    ledger = ledger_with(0)
    go_to(ledger, 0, 3)
    assert assign(ledger) == []
    assert deliver(ledger) is None
    assert ledger.awaited() == []
    assert ledger.head() == PlannedWork(0, 3)


def test_no_batches_are_never_assigned() -> None:
    ledger = ledger_with(2)
    assert go_to(ledger, 0, 0, num_batches=0) == []
    assert assign(ledger) == []
    assert deliver(ledger) is None


def test_batches_go_on_across_the_end_of_an_epoch() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 4, 1, num_batches=2)
    assert [task.work for task in assign(ledger)] == [PlannedWork(4, 1), PlannedWork(5, 0)]


def test_a_new_generation_gives_back_what_was_ready() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    answer(ledger, assign(ledger)[0], "of the first generation")
    assert go_to(ledger, 0, 0) == ["of the first generation"]
    assert ledger.generation == 2


def test_idle_workers_get_the_first_tasks() -> None:
    ledger = ledger_with(4)
    go_to(ledger, 0, 0)
    assert sorted(task.worker for task in assign(ledger)) == [0, 1, 2, 3]


def test_a_fast_worker_gets_more_tasks_ahead_than_a_slow_one() -> None:
    limits = Limits(max_in_flight=100, max_ready_per_worker=50, max_tasks=50, in_order=True)
    ahead = {}
    for build_s in (1e-4, 1.0):
        ledger = ledger_with(1, limits=limits)
        go_to(ledger, 0, 0)
        first, *rest = assign(ledger)
        answer(ledger, first, build_s=build_s)
        ahead[build_s] = len(rest) + len(assign(ledger))
    assert ahead[1e-4] > ahead[1.0] == 2


@pytest.mark.parametrize(("in_order", "num_waiting"), [(True, 0), (False, 1)])
def test_in_order_no_task_waits_at_a_worker_whose_batches_vary(in_order: bool, num_waiting: int) -> None:
    ledger = ledger_with(1, limits=Limits(100, 100, 10, in_order))
    go_to(ledger, 0, 0, num_batches=100)
    tasks = deque(assign(ledger))
    for build_s in (0.1, 0.2, 0.1, 0.2):
        answer(ledger, tasks.popleft(), build_s=build_s)
        tasks.extend(assign(ledger))
    assert len(tasks) == 1 + num_waiting
    for _ in range(30):
        answer(ledger, tasks.popleft(), build_s=0.15)
        tasks.extend(assign(ledger))
    assert len(tasks) == 2


@pytest.mark.parametrize("max_in_flight", [4, 5, 6, 7])
def test_no_task_waits_at_a_worker_while_it_takes_another_ones_only_task(max_in_flight: int) -> None:
    ledger = ledger_with(4, limits=Limits(max_in_flight, 4, 10, in_order=True))
    go_to(ledger, 0, 0, num_batches=100)
    assert sorted(task.worker for task in assign(ledger)) == [0, 1, 2, 3]


def test_a_worker_never_has_more_tasks_than_a_pipe_holds() -> None:
    limits = Limits(max_in_flight=10_000, max_ready_per_worker=10_000, max_tasks=10_000, in_order=True)
    ledger = ledger_with(1, limits=limits)
    num_sent = 0
    for epoch in range(20):
        go_to(ledger, epoch, 0)
        tasks = assign(ledger)
        num_sent += len(tasks)
        if epoch == 0:
            answer(ledger, tasks[0], build_s=0.0)
            num_sent += len(assign(ledger)) - 1
    assert MAX_TASKS <= num_sent <= 3 * MAX_TASKS


def test_in_completion_order_the_next_epoch_waits_for_the_last_batch_of_this_one() -> None:
    ledger = ledger_with(2, limits=Limits(4, 4, 4, in_order=False))
    go_to(ledger, 0, 0, num_batches=2)
    tasks = assign(ledger)
    slow, *others = [task for task in tasks if task.worker == tasks[0].worker]
    fast = [task for task in tasks if task.worker != slow.worker]
    for task in fast:
        answer(ledger, task)
    assert (fast[0].work.epoch, fast[1].work.epoch) == (0, 1)
    assert deliver(ledger) == (fast[0].sequence, "batch")
    assert deliver(ledger) is None
    assert ledger.awaited() == [slow.worker]
    answer(ledger, slow)
    assert deliver(ledger) == (slow.sequence, "batch")
    assert deliver(ledger) == (fast[1].sequence, "batch")
    assert len(others) == 1


def test_the_worker_the_loop_waits_for_is_the_one_with_the_next_batch() -> None:
    ledger = ledger_with(3)
    go_to(ledger, 0, 0)
    first, second, *_ = assign(ledger)
    assert ledger.awaited() == [first.worker]
    answer(ledger, first)
    deliver(ledger)
    assert ledger.awaited() == [second.worker]


def test_what_a_worker_had_in_its_hands_is_built_by_others_first() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    tasks = assign(ledger)
    answer(ledger, tasks[0])
    assert ledger.remove_worker(0) == len(tasks) - 1
    assert ledger.remove_worker(0) == 0
    assert ledger.work_of(0) is None
    assert ledger.awaited() == []
    assert deliver(ledger) == (0, "batch")
    ledger.queues.add(1, worker_id=0)
    again = assign(ledger)
    assert [task.sequence for task in again[: len(tasks) - 1]] == [task.sequence for task in tasks[1:]]
    assert {task.worker for task in again} == {1}


def test_a_worker_with_enough_batches_ready_builds_what_was_lost_all_the_same() -> None:
    ledger = ledger_with(2, limits=Limits(8, 1, 1, in_order=True))
    go_to(ledger, 0, 0)
    first, second = assign(ledger)
    answer(ledger, second)
    assert assign(ledger) == []
    ledger.remove_worker(first.worker)
    assert [(task.worker, task.sequence) for task in assign(ledger)] == [(second.worker, first.sequence)]


def test_batches_of_a_generation_that_is_over_are_not_lost_with_a_worker() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    assign(ledger)
    go_to(ledger, 3, 0)
    assert ledger.remove_worker(0) == 0


def test_batches_that_were_ready_before_their_worker_died_are_delivered() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    for task in assign(ledger):
        answer(ledger, task, outcome=f"batch {task.work.step}")
    ledger.remove_worker(0)
    assert deliver(ledger) == (0, "batch 0")
    assert deliver(ledger) == (1, "batch 1")


@pytest.mark.parametrize("task", [(1, 1), (2, 0), (0, 0)])
def test_an_answer_out_of_turn_is_refused_and_changes_nothing(task: Task) -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    due = assign(ledger)[0]
    with pytest.raises(ProtocolError, match="worker 0 answered"):
        ledger.complete(0, task[0], task[1], "batch", 0.1)
    assert deliver(ledger) is None
    assert answer(ledger, due)


def test_a_task_of_the_current_generation_may_not_be_skipped() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    assign(ledger)
    with pytest.raises(ProtocolError, match="worker 0 skipped"):
        ledger.skip(0, 1)


def test_the_state_can_be_read() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    answer(ledger, assign(ledger)[0])
    assert repr(ledger) == "<Ledger generation 1, tasks sent: worker 0: 1, 1 ready>"


def test_every_state_of_a_batch_can_be_reached_and_every_move_is_used() -> None:
    assert {BatchState.PLANNED, *BATCH_STATES.values()} == set(BatchState)
    assert {move for _, move in BATCH_STATES} == set(BatchMove)
    assert not any(state is BatchState.GONE for state, _ in BATCH_STATES)


def test_a_move_that_the_table_lacks_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="a batch is gone, which complete can't follow"):
        BATCH_STATES[BatchState.GONE, BatchMove.COMPLETE]


def test_a_samplers_indices_are_sent_again_when_a_batch_is_lost() -> None:
    ledger = ledger_with(1)
    ledger.begin(IndexSource(0, 0, iter([[5, 3], [1, 2]])), reuses_trial=False)
    first, second = assign(ledger)
    ledger.remove_worker(0)
    ledger.queues.add(1, worker_id=0)
    assert [task.work for task in assign(ledger)] == [first.work, second.work]
    assert not ledger.is_exhausted
    for task in (first, second):
        ledger.complete(1, task.generation, task.sequence, "batch", 0.1)
        deliver(ledger)
    assert (ledger.is_exhausted, ledger.head()) == (True, None)


def test_a_stream_ends_with_its_shards_and_only_their_own_workers_build_them() -> None:
    lengths, delivered = {0: 2, 1: 0, 2: 1}, []
    ledger = ledger_with(3, limits=Limits(6, 3, 10, in_order=True))
    ledger.begin(StreamSource(0, 3), reuses_trial=False)
    while not ledger.is_exhausted:
        for task in assign(ledger):
            assert isinstance(task.work, StreamWork)
            assert task.worker == task.work.worker_id
            if task.work.turn < lengths[task.work.worker_id]:
                answer(ledger, task, f"{task.work.worker_id}.{task.work.turn}")
            else:
                ledger.end_shard(task.worker, task.generation, task.sequence)
        while (batch := deliver(ledger)) is not None:
            delivered.append(batch[1])
    assert delivered == ["0.0", "2.0", "0.1"]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    slow=st.integers(0, 3),
    max_in_flight=st.integers(1, 12),
    data=st.data(),
)
def test_out_of_order_a_slow_shard_holds_up_no_other(
    lengths: list[int], slow: int, max_in_flight: int, data: st.DataObject
) -> None:
    """The batches of all other shards are delivered while one worker answers nothing."""
    num_workers = len(lengths)
    slow %= num_workers
    limits = Limits(max_in_flight + num_workers, data.draw(st.integers(1, 3)), 10, in_order=False)
    ledger = ledger_with(num_workers, limits=limits)
    ledger.begin(StreamSource(0, num_workers), reuses_trial=False)
    sent: list[Send] = []
    delivered: list[tuple[int, int]] = []

    def go_on(may_answer: Callable[[int], bool]) -> None:
        while True:
            sent.extend(assign(ledger))
            ready = [task for task in sent if may_answer(task.worker) and task == next_of(sent, task.worker)]
            if not ready:
                return
            task = data.draw(st.sampled_from(ready))
            sent.remove(task)
            assert isinstance(task.work, StreamWork)
            if task.work.turn < lengths[task.work.worker_id]:
                answer(ledger, task, f"{task.work.worker_id} {task.work.turn}")
            else:
                ledger.end_shard(task.worker, task.generation, task.sequence)
            while (batch := deliver(ledger)) is not None:
                worker, turn = (batch[1] or "").split()
                delivered.append((int(worker), int(turn)))

    go_on(lambda worker: worker != slow)
    whole = {(worker, turn) for worker, length in enumerate(lengths) for turn in range(length)}
    assert set(delivered) == {one for one in whole if one[0] != slow}
    go_on(lambda _: True)
    assert sorted(delivered) == sorted(whole)
    assert ledger.is_exhausted
    for worker in range(num_workers):
        turns = [turn for one, turn in delivered if one == worker]
        assert turns == sorted(turns), "a shard's batches come in its order"


def next_of(sent: list[Send], worker: int) -> Send:
    """Return the oldest task of a worker."""
    return next(task for task in sent if task.worker == worker)


def test_a_lost_batch_of_a_stream_waits_for_its_place_and_holds_up_no_other() -> None:
    ledger = ledger_with(2, limits=Limits(2, 3, 10, in_order=True))
    ledger.begin(StreamSource(0, 2), reuses_trial=False)
    tasks = assign(ledger)
    for worker in (0, 1):
        ledger.remove_worker(worker)
    ledger.queues.add(3, worker_id=1)
    assert [(task.worker, task.work) for task in assign(ledger)] == [(3, tasks[1].work)]
    ledger.queues.add(4, worker_id=0)
    assert [(task.worker, task.work) for task in assign(ledger)] == [(4, tasks[0].work)]


def test_the_end_of_a_stream_is_refused_for_planned_work() -> None:
    ledger = ledger_with(1)
    go_to(ledger, 0, 0)
    task = assign(ledger)[0]
    with pytest.raises(ProtocolError, match="worker 0 told the end of a stream for PlannedWork"):
        ledger.end_shard(0, task.generation, task.sequence)


@pytest.mark.parametrize("reuses_trial", [True, False])
@pytest.mark.parametrize("step", [0, 1])
def test_the_trial_batch_is_used_for_the_same_work_unless_it_means_another_batch(reuses_trial: bool, step: int) -> None:
    ledger = ledger_with(2)
    ledger.try_out(PlannedWork(0, 0))
    trial = ledger.assign()
    assert trial is not None
    assert ledger.assign() is None
    answer(ledger, trial, "trial")
    is_used = reuses_trial and step == 0
    dropped = ledger.begin(PlannedSource(0, step, lambda _: 10), reuses_trial=reuses_trial)
    assert [batch.answer for batch in dropped] == ([] if is_used else ["trial"])
    assert deliver(ledger) == ((0, "trial") if is_used else None)
    assert assign(ledger)[0].work == PlannedWork(0, 1 if is_used else step)


def test_what_several_workers_lost_is_sent_again_in_the_order_of_delivery() -> None:
    ledger = ledger_with(2, limits=Limits(4, 4, 10, in_order=True))
    go_to(ledger, 0, 0)
    tasks = assign(ledger)
    assert {task.worker for task in tasks[:2]} == {0, 1}
    for worker in (tasks[1].worker, tasks[0].worker):
        ledger.remove_worker(worker)
    ledger.queues.add(2, worker_id=0)
    ledger.queues.add(3, worker_id=1)
    assert [task.sequence for task in assign(ledger)] == [0, 1, 2, 3]


def test_after_a_change_of_the_limits_any_worker_builds_what_was_one_workers() -> None:
    ledger = ledger_with(1)
    work = [IndexWork(0, step, [step], step) for step in range(4)]
    ledger.begin(Works(work), reuses_trial=False)
    assert [task.work for task in assign(ledger)] == work[:1]
    ledger.use_limits(Limits(3, 3, 3, in_order=True))
    assert ledger.remove_worker(0) == 1
    ledger.queues.add(1, worker_id=5)
    assert [task.work for task in assign(ledger)] == [one._replace(worker_id=None) for one in work[:2]]


class Works:
    """Hands out these works."""

    def __init__(self, works: list[IndexWork]) -> None:
        self.works = deque(works)

    def next(self) -> IndexWork | None:
        return self.works.popleft() if self.works else None

    def end_shard(self, work: StreamWork) -> None:
        pass

    def swap(self, work: StreamWork) -> StreamWork:
        return work
