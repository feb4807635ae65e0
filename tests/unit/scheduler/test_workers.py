from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.workers import WORKER_STATES, Worker, WorkerMove, WorkerState

MOVES = st.sampled_from(list(WorkerMove))


@given(st.lists(MOVES))
def test_a_worker_moves_by_the_table_alone_and_a_move_that_is_not_there_changes_nothing(
    moves: list[WorkerMove],
) -> None:
    worker = Worker(3, 1)
    for move in moves:
        before = worker.state
        if (before, move) in WORKER_STATES:
            worker.move(move)
            assert worker.state is WORKER_STATES[before, move]
        else:
            with pytest.raises(ProtocolError, match=f"worker 3 is {before.value}, which {move.value} can't follow"):
                worker.move(move)
            assert worker.state is before


def test_from_every_state_a_worker_can_be_gone_and_then_nothing_follows() -> None:
    for state in WorkerState:
        reachable, todo = {state}, [state]
        while todo:
            here = todo.pop()
            for (start, _), stop in WORKER_STATES.items():
                if start is here and stop not in reachable:
                    reachable.add(stop)
                    todo.append(stop)
        assert WorkerState.GONE in reachable
    assert not any(start is WorkerState.GONE for start, _ in WORKER_STATES)


def test_every_state_can_be_reached_and_every_move_is_used() -> None:
    assert {WorkerState.STARTING, *WORKER_STATES.values()} == set(WorkerState)
    assert {move for _, move in WORKER_STATES} == set(WorkerMove)


def test_a_worker_that_gets_tasks_was_starting_or_stays() -> None:
    ready = [(state, move) for (state, move), after in WORKER_STATES.items() if after is WorkerState.READY]
    assert ready == [(WorkerState.STARTING, WorkerMove.READY), (WorkerState.LEAVING, WorkerMove.STAY)]


def test_a_worker_that_was_dismissed_is_never_taken_for_dead() -> None:
    after = {WorkerState.DISMISSED, WorkerState.PARTING, WorkerState.GONE}
    assert all(stop in after for (start, _), stop in WORKER_STATES.items() if start in after)


def test_a_worker_is_busy_since_its_task_was_sent_or_the_one_before_was_answered() -> None:
    worker = Worker(0, 0)
    assert worker.busy_since_s == math.inf
    worker.sent_s.extend([1.0, 2.0])
    assert worker.busy_since_s == 1.0
    worker.note_answer(5.0)
    assert worker.busy_since_s == 5.0
    worker.note_answer(6.0)
    assert worker.busy_since_s == math.inf


def test_a_worker_that_was_killed_is_judged_by_that() -> None:
    worker = Worker(0, 0, killed_s=7.0)
    worker.sent_s.append(1.0)
    assert worker.busy_since_s == 7.0
    worker.postpone(2.0)
    assert worker.busy_since_s == 9.0


@given(sent=st.lists(st.integers(0, 100)), answered=st.integers(0, 100), seconds=st.integers(0, 1000))
def test_time_in_which_the_trainer_was_stopped_is_not_the_workers(sent: list[int], answered: int, seconds: int) -> None:
    worker = Worker(0, 0, answered_s=answered)
    worker.sent_s.extend(sorted(sent))
    before = worker.busy_since_s
    worker.postpone(seconds)
    assert worker.busy_since_s == before + seconds
    assert len(worker.sent_s) == len(sent)
