from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.queues import WORKER_STATES, Worker, WorkerMove, WorkerState


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
