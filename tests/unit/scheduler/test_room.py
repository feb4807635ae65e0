"""The worker with the least to do is found as by looking at all of them, whatever happened before."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swift_loader.scheduler.queues import Limits, Queues
from swift_loader.scheduler.room import MIN_ENTRIES, Room
from swift_loader.scheduler.work import IndexWork, PlannedWork, StreamWork, Work
from swift_loader.scheduler.worker_queue import MAX_TASKS, Queue

NUM_IDS = 4

LIMITS = st.builds(
    Limits,
    max_in_flight=st.integers(1, 24),
    max_ready_per_worker=st.integers(1, 4),
    max_tasks=st.integers(1, 5),
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


class RoomModel(RuleBasedStateMachine):
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

    def some(self, data: st.DataObject, which: Callable[[Queue], bool]) -> Queue | None:
        """Draw a worker of a kind."""
        serials = [serial for serial, queue in self.queues._queues.items() if which(queue)]
        return self.queues._queues[data.draw(st.sampled_from(serials))] if serials else None

    @rule(worker_id=st.integers(0, NUM_IDS - 1))
    def add(self, worker_id: int) -> None:
        self.queues.add(self.num_added, worker_id)
        self.is_open.add(self.num_added)
        self.num_added += 1

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda _: True):
            self.queues.retire(queue.serial)
            self.is_open.discard(queue.serial)

    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda _: True):
            self.queues.reopen(queue.serial)
            self.is_open.add(queue.serial)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda _: True):
            assert self.queues.remove(queue.serial) == list(queue.tasks)
            self.is_open.discard(queue.serial)

    @rule(work=WORKS, is_lost=st.booleans(), number=st.integers(1, 12))
    def give_tasks(self, work: Work, is_lost: bool, number: int) -> None:
        """As the ledger does: to the worker that was picked."""
        for _ in range(number):
            max_ready = math.inf if is_lost else self.limits.max_ready_per_worker
            expected = scan(self.queues, self.is_open, self.limits, work, max_ready)
            picked = self.queues.pick_for_lost(work) if is_lost else self.queues.pick(work)
            assert picked == expected
            if picked is None:
                return
            self.push(picked)

    @rule(data=st.data())
    def give_a_task_to_anybody(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda _: True):
            self.push(queue.serial)

    def push(self, serial: int) -> None:
        self.queues.push(serial, (self.generation, self.num_pushed))
        self.num_pushed += 1

    @rule(data=st.data(), build_s=st.none() | st.sampled_from([0.0, 1e-5, 1e-3, 0.5]), number=st.integers(1, 5))
    def answer(self, data: st.DataObject, build_s: float | None, number: int) -> None:
        for _ in range(number):
            if queue := self.some(data, lambda queue: bool(queue.tasks)):
                task = queue.tasks[0]
                self.queues.complete(queue.serial, task, build_s, is_current=task[0] == self.generation)

    @rule(data=st.data())
    def answer_without_a_batch(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda queue: bool(queue.tasks)):
            task = queue.tasks[0]
            self.queues.pop(queue.serial, task, is_current=task[0] == self.generation)

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda queue: queue.num_ready > 0):
            self.queues.note_ready(queue.serial, -1)

    @rule(data=st.data())
    def adopt_a_trial_batch(self, data: st.DataObject) -> None:
        if queue := self.some(data, lambda _: True):
            self.queues.note_ready(queue.serial, 1)

    @rule()
    def begin(self) -> None:
        self.queues.begin()
        self.generation += 1

    @rule(limits=LIMITS)
    def use_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.queues.use_limits(limits)

    @precondition(lambda self: hasattr(self, "queues"))
    @rule(work=WORKS)
    def pick(self, work: Work) -> None:
        expected = scan(self.queues, self.is_open, self.limits, work, self.limits.max_ready_per_worker)
        assert self.queues.pick(work) == expected

    @rule(work=WORKS)
    def pick_for_lost(self, work: Work) -> None:
        assert self.queues.pick_for_lost(work) == scan(self.queues, self.is_open, self.limits, work, math.inf)


def run_model(max_examples: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    how = settings(
        max_examples=max_examples,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        phases=phases,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(RoomModel, settings=how)


def test_in_any_interleaving_the_worker_is_the_one_that_a_scan_finds() -> None:
    run_model(300)


@pytest.mark.slow
def test_in_thousands_of_interleavings_the_worker_is_the_one_that_a_scan_finds() -> None:
    run_model(1000)


def test_a_worker_that_has_less_to_do_again_and_again_leaves_no_old_entries() -> None:
    room = Room(share=10, max_ready=2000)
    queue = Queue(serial=0, worker_id=0, max_tasks=10, num_ready=1000)
    room.open(queue)
    for _ in range(1000):
        queue.num_ready -= 1
        room.note_less(queue)
    assert (room.least(), queue.num_ready) == (0, 0)
    assert len(room._entries) <= 2 + MIN_ENTRIES


def test_of_equal_workers_the_one_with_the_lowest_id_comes_first_also_if_it_is_a_replacement() -> None:
    room = Room(share=1, max_ready=1)
    for serial, worker_id in ((0, 1), (1, 2), (2, 0)):
        room.open(Queue(serial, worker_id, max_tasks=1))
    assert room.least() == 2
    room.close(2)
    assert room.least() == 0


def forget_that_a_batch_was_delivered(patch: pytest.MonkeyPatch) -> None:
    def note_ready(self: Queues, serial: int, change: int) -> None:
        self._queues[serial].num_ready += change

    patch.setattr(Queues, "note_ready", note_ready)


def keep_the_entry_of_a_worker_with_less_to_do(patch: pytest.MonkeyPatch) -> None:
    real = Room.note_less

    def note_less(self: Room, queue: Queue) -> None:
        if queue.entry is None:
            real(self, queue)

    patch.setattr(Room, "note_less", note_less)


def trust_the_first_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "least", lambda self: self._entries[0][3] if self._entries else None)


def forget_that_limits_were_raised(patch: pytest.MonkeyPatch) -> None:
    def use(self: Room, share: int, max_ready: int) -> None:
        self._share, self._max_ready = share, max_ready

    patch.setattr(Room, "use", use)


def forget_workers_with_many_ready_batches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "least_for_lost", Room.least)


def ignore_a_new_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "look_again", lambda self: None)


MUTANTS = [
    forget_that_a_batch_was_delivered,
    keep_the_entry_of_a_worker_with_less_to_do,
    trust_the_first_entry,
    forget_that_limits_were_raised,
    forget_workers_with_many_ready_batches,
    ignore_a_new_generation,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_room_that_errs_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        run_model(400, (Phase.generate,))
