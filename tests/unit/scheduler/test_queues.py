from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.queues import Limits, Queues
from swift_loader.scheduler.work import IndexWork, PlannedWork, StreamWork
from swift_loader.scheduler.worker_queue import MAX_TASKS

LIMITS = Limits(max_in_flight=1000, max_ready_per_worker=100, max_tasks=1000, in_order=True)
WORK = PlannedWork(0, 0)


def queues_of(num_workers: int, limits: Limits = LIMITS) -> Queues:
    """Return queues of workers 0, 1, ...; the id of worker i is i."""
    queues = Queues(limits)
    for serial in range(num_workers):
        queues.add(serial, worker_id=serial)
    return queues


def num_given(queues: Queues, limit: int = 200) -> int:
    """Return how many tasks the workers get until none has room."""
    for number in range(limit):
        serial = queues.pick(WORK)
        if serial is None:
            return number
        queues.push(serial, (0, number))
    return limit


@given(num_workers=st.integers(1, 4), max_in_flight=st.integers(1, 12))
def test_tasks_are_spread_evenly_and_no_worker_gets_more_than_its_share(num_workers: int, max_in_flight: int) -> None:
    limits = replace(LIMITS, max_in_flight=max_in_flight)
    queues = queues_of(num_workers, limits)
    counts = [0] * num_workers
    while (serial := queues.pick(WORK)) is not None:
        assert counts[serial] == min(counts)
        queues.push(serial, (0, sum(counts)))
        counts[serial] += 1
        assert max(counts) <= limits.share(num_workers)
    assert set(counts) == {min(2, limits.share(num_workers))}


@given(num_workers=st.integers(1, 4), max_in_flight=st.integers(1, 200))
def test_a_streams_batches_wait_at_their_worker_up_to_its_share(num_workers: int, max_in_flight: int) -> None:
    limits = replace(LIMITS, max_in_flight=max_in_flight)
    queues = queues_of(num_workers, limits)
    for build_s in (0.1, 0.5):  # its times vary
        queues.push(0, (0, 0))
        queues.complete(0, (0, 0), build_s, is_current=True)
    turn = 0
    while queues.pick(StreamWork(0, turn, 0, turn)) == 0:
        queues.push(0, (0, turn))
        turn += 1
    assert turn == min(MAX_TASKS, limits.share(num_workers))


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
    queues = queues_of(1, replace(LIMITS, in_order=in_order))
    for number, seconds in enumerate(build_s):
        queues.push(0, (0, number))
        queues.complete(0, (0, number), seconds, is_current=True)
        queues.note_ready(0, -1)
    assert num_given(queues) == num_tasks


def test_the_users_limit_of_tasks_holds() -> None:
    queues = queues_of(1, replace(LIMITS, max_tasks=3))
    queues.push(0, (0, 0))
    queues.complete(0, (0, 0), 0.0, is_current=True)
    queues.note_ready(0, -1)
    assert num_given(queues) == 3


def test_a_worker_with_many_ready_batches_gets_no_task_unless_one_was_lost() -> None:
    queues = queues_of(2, replace(LIMITS, max_ready_per_worker=3))
    queues.push(1, (0, 0))
    for number in range(3):
        queues.push(0, (0, number))
        queues.complete(0, (0, number), None, is_current=True)
    assert (queues.pick(WORK), queues.pick_for_lost(WORK)) == (1, 0)
    queues.retire(1)
    assert (queues.pick(WORK), queues.pick_for_lost(WORK)) == (None, 0)
    queues.note_ready(0, -1)
    assert (queues.pick(WORK), queues.pick_for_lost(WORK)) == (0, 0)


def test_only_the_worker_of_a_shard_builds_its_batches() -> None:
    queues = queues_of(3)
    queues.push(2, (0, 0))
    assert [queues.pick(StreamWork(0, 1, worker_id, 0)) for worker_id in (0, 1, 2, 3)] == [0, 1, 2, None]


def test_only_the_worker_that_a_samplers_batch_names_builds_it() -> None:
    queues = queues_of(2)
    queues.push(1, (0, 0))
    assert [queues.pick(IndexWork(0, 1, [5], worker_id)) for worker_id in (None, 0, 1, 2)] == [0, 0, 1, None]


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


def test_a_worker_that_is_gone_answers_nothing_and_is_forgotten_once() -> None:
    queues = queues_of(1)
    queues.push(0, (7, 1))
    assert queues.remove(0) == [(7, 1)]
    assert queues.remove(0) == []
    assert (queues.first(0), queues.pick(WORK), repr(queues)) == (None, None, "none")
    with pytest.raises(ProtocolError, match=r"worker 0 answered task \(7, 1\), but its next task is None"):
        queues.pop(0, (7, 1), is_current=True)


def test_a_retired_worker_gets_no_task_and_still_answers() -> None:
    queues = queues_of(2)
    queues.push(0, (0, 1))
    queues.retire(0)
    queues.retire(0)
    assert [queues.pick(StreamWork(0, 0, worker_id, 0)) for worker_id in (0, 1)] == [None, 1]
    queues.pop(0, (0, 1), is_current=True)
    assert queues.first(0) is None


def test_tasks_of_earlier_generations_stay_but_are_not_counted() -> None:
    queues = queues_of(2)
    queues.push(1, (0, 0))
    assert queues.busy() == [1]
    queues.begin()
    assert queues.busy() == []
    assert queues.first(1) == (0, 0)
    assert repr(queues) == "worker 0: 0, worker 1: 1"


@given(limits=st.builds(Limits, st.integers(1, 50), st.integers(1, 9), st.integers(1, 9), st.booleans()))
def test_the_batches_of_one_worker_are_limited_by_those_of_all(limits: Limits) -> None:
    for num_workers in range(5):
        assert 1 <= limits.share(num_workers) <= limits.max_in_flight
        assert limits.share(num_workers) * max(1, num_workers) <= max(limits.max_in_flight, num_workers)
        assert 1 <= limits.max_of_worker(num_workers) <= limits.max_in_flight
    assert limits.max_of_worker(1) == min(
        limits.max_in_flight, limits.max_ready_per_worker + min(limits.max_tasks, limits.max_in_flight)
    )


def test_a_worker_gets_a_second_task_once_all_expected_workers_are_there() -> None:
    queues = Queues(replace(LIMITS, num_expected=2))
    queues.add(0, 0)
    queues.push(0, (1, 0))
    assert queues.pick(PlannedWork(0, 1)) is None
    queues.add(1, 1)
    assert queues.pick(PlannedWork(0, 1)) == 1
    queues.push(1, (1, 1))
    assert queues.pick(PlannedWork(0, 2)) == 0
