from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.sampling.work import IndexWork, StreamRounds, StreamWork, WorkSource
from swift_loader.scheduler.ledger import Ledger
from swift_loader.scheduler.messages import Action, Answered, NoBatch, Send
from swift_loader.scheduler.queues import MAX_TASKS, Limits, WorkerMove, Workers
from tests.support.work import planned

LIMITS = Limits(max_in_flight=4, max_ready_per_worker=3, in_order=True)


def assign(ledger: Ledger) -> list[Send]:
    """Return all tasks for which there is room."""
    sends = list[Action]()
    ledger.assign(sends, 0.0)
    return [send for send in sends if isinstance(send, Send)]


def ledger_with(num_workers: int, limits: Limits = LIMITS, source: WorkSource | None = None) -> Ledger:
    ledger = Ledger(Workers(limits), 1, source or planned(0, 0, lambda _: 10))
    for index in range(num_workers):
        add(ledger, index, index)
    return ledger


def add(ledger: Ledger, serial: int, worker_id: int) -> None:
    ledger.workers.meet(serial, worker_id).move(WorkerMove.READY)


def remove(ledger: Ledger, serial: int) -> int:
    return ledger.remove_worker(ledger.workers.by_serial[serial])


def deliver(ledger: Ledger) -> tuple[int, str | None] | None:
    batch = ledger.deliver()
    return None if batch is None else (batch.sequence, batch.batch)


def answer(ledger: Ledger, task: Send, outcome: str = "batch", build_s: float = 0.1) -> None:
    ledger.take_in(Answered(task, outcome, build_s=build_s), 0.0)


@pytest.mark.parametrize("max_in_flight", [4, 5, 6, 7])
def test_no_task_waits_at_a_worker_while_it_takes_another_ones_only_task(max_in_flight: int) -> None:
    ledger = ledger_with(4, limits=Limits(max_in_flight, 4, in_order=True))
    assert sorted(task.worker for task in assign(ledger)) == [0, 1, 2, 3]


def test_a_worker_never_has_more_tasks_than_a_pipe_holds() -> None:
    limits = Limits(max_in_flight=10_000, max_ready_per_worker=10_000, in_order=True)
    ledger = ledger_with(1, limits=limits)
    num_sent = 0
    for epoch in range(20):
        ledger.workers.begin()
        ledger = Ledger(ledger.workers, epoch + 1, planned(0, 0, lambda _: 10))
        tasks = assign(ledger)
        num_sent += len(tasks)
        if epoch == 0:
            answer(ledger, tasks[0], build_s=0.0)
            num_sent += len(assign(ledger)) - 1
    assert MAX_TASKS <= num_sent <= 3 * MAX_TASKS


def test_in_completion_order_the_next_epoch_waits_for_the_last_batch_of_this_one() -> None:
    ledger = ledger_with(2, limits=Limits(4, 4, in_order=False), source=planned(0, 0, lambda _: 2))
    tasks = assign(ledger)
    slow, *others = [task for task in tasks if task.worker == tasks[0].worker]
    fast = [task for task in tasks if task.worker != slow.worker]
    for task in fast:
        answer(ledger, task)
    assert (fast[0].work.epoch, fast[1].work.epoch) == (0, 1)
    assert deliver(ledger) == (fast[0].sequence, "batch")
    assert deliver(ledger) is None
    assert [worker.serial for worker in ledger.awaited()] == [slow.worker]
    answer(ledger, slow)
    assert deliver(ledger) == (slow.sequence, "batch")
    assert deliver(ledger) == (fast[1].sequence, "batch")
    assert len(others) == 1


def test_a_worker_with_enough_batches_ready_builds_what_was_lost_all_the_same() -> None:
    ledger = ledger_with(2, limits=Limits(8, 1, in_order=True, num_expected=3))  # one task each
    first, second = assign(ledger)
    answer(ledger, second)
    assert assign(ledger) == []
    remove(ledger, first.worker)
    assert [(task.worker, task.sequence) for task in assign(ledger)] == [(second.worker, first.sequence)]


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
    limits = Limits(max_in_flight + num_workers, data.draw(st.integers(1, 3)), in_order=False)
    ledger = ledger_with(num_workers, limits, StreamRounds(0, num_workers))
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
                ledger.take_in(NoBatch(task), 0.0)
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
    return next(task for task in sent if task.worker == worker)


def test_a_lost_batch_of_a_stream_waits_for_its_place_and_holds_up_no_other() -> None:
    ledger = ledger_with(2, Limits(2, 3, in_order=True), StreamRounds(0, 2))
    tasks = assign(ledger)
    for worker in (0, 1):
        remove(ledger, worker)
    add(ledger, 3, worker_id=1)
    assert [(task.worker, task.work) for task in assign(ledger)] == [(3, tasks[1].work)]
    add(ledger, 4, worker_id=0)
    assert [(task.worker, task.work) for task in assign(ledger)] == [(4, tasks[0].work)]


def test_what_several_workers_lost_is_sent_again_in_the_order_of_delivery() -> None:
    ledger = ledger_with(2, limits=Limits(4, 4, in_order=True))
    tasks = assign(ledger)
    assert {task.worker for task in tasks[:2]} == {0, 1}
    for worker in (tasks[1].worker, tasks[0].worker):
        remove(ledger, worker)
    add(ledger, 2, worker_id=0)
    add(ledger, 3, worker_id=1)
    assert [task.sequence for task in assign(ledger)] == [0, 1, 2, 3]


def test_after_a_change_of_the_limits_any_worker_builds_what_was_one_workers() -> None:
    work = [IndexWork(0, step, [step], step) for step in range(4)]
    ledger = ledger_with(1, source=Works(work))
    assert [task.work for task in assign(ledger)] == work[:1]
    ledger.use_limits(Limits(3, 3, in_order=True))
    assert remove(ledger, 0) == 1
    add(ledger, 1, worker_id=5)
    assert [task.work for task in assign(ledger)] == [one._replace(worker_id=None) for one in work[:2]]


class Works(WorkSource):
    """Hands out these works."""

    def __init__(self, works: list[IndexWork]) -> None:
        self.works = deque(works)

    def next(self) -> IndexWork | None:
        return self.works.popleft() if self.works else None
