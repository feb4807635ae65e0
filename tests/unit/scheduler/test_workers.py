from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.scheduler import WORKER_STATES, Worker, WorkerMove, WorkerState


@given(st.lists(st.sampled_from(list(WorkerMove))))
def test_a_move_that_the_table_lacks_is_refused_and_changes_nothing(moves: list[WorkerMove]) -> None:
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


def test_only_one_that_starts_or_leaves_gets_tasks_and_a_dismissed_one_is_never_taken_for_dead() -> None:
    ready = [(state, move) for (state, move), after in WORKER_STATES.items() if after is WorkerState.READY]
    assert ready == [(WorkerState.STARTING, WorkerMove.READY), (WorkerState.LEAVING, WorkerMove.STAY)]
    after = {WorkerState.DISMISSED, WorkerState.PARTING, WorkerState.GONE}
    assert all(stop in after for (start, _), stop in WORKER_STATES.items() if start in after)
    assert not any(start is WorkerState.GONE for start, _ in WORKER_STATES)


def test_a_worker_is_busy_since_its_task_was_sent_the_last_one_was_answered_or_it_was_killed() -> None:
    worker = Worker(0, 0)
    assert worker.busy_since_s == math.inf
    worker.sent_s.extend([1.0, 2.0])
    assert worker.busy_since_s == 1.0
    worker.note_answer(5.0)
    assert worker.busy_since_s == 5.0
    worker.note_answer(6.0)
    assert worker.busy_since_s == math.inf
    killed = Worker(0, 0, killed_s=7.0)
    killed.sent_s.append(1.0)
    killed.postpone(2.0)
    assert killed.busy_since_s == 9.0
