from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.scheduler.restarts import TEMPLATE, Decision, Restarts


@given(budget=st.integers(0, 3), events=st.lists(st.tuples(st.booleans(), st.integers(-1, 2), st.integers(0, 3))))
def test_deaths_count_only_until_a_batch_forgives_them(budget: int, events: list[tuple[bool, int, int]]) -> None:
    """Compares with the rules, read off the history: each event is a batch or a death, a worker id and a batch."""
    restarts = Restarts(budget)
    for number, (is_batch, worker_id, batch) in enumerate(events):
        if is_batch:
            restarts.note_batch(worker_id, batch)
            continue
        decision = restarts.note_death(worker_id, batch)
        in_a_row = by_batch = 0
        for was_batch, where, which in events[: number + 1]:
            if worker_id in (where, TEMPLATE):
                in_a_row = 0 if was_batch else in_a_row + (where == worker_id)
            if which == batch:
                by_batch = 0 if was_batch else by_batch + 1
        assert restarts.num_in_a_row(worker_id) == in_a_row
        if budget and by_batch >= 2:
            assert decision is Decision.BATCH_IS_TO_BLAME
        else:
            assert decision is (Decision.REPLACE if in_a_row <= budget else Decision.TOO_MANY)
    assert restarts.is_counting or all(is_batch for is_batch, _, _ in events[-1:])


def test_deaths_are_counted_until_all_are_made_up_for_or_batches_mean_others() -> None:
    restarts = Restarts(3)
    was_counting = [restarts.is_counting]
    restarts.note_death(0, (2, 7))
    restarts.note_death(TEMPLATE, None)
    was_counting.append(restarts.is_counting)
    restarts.note_batch(0, (2, 6))
    was_counting.append(restarts.is_counting)  # the death at batch 7
    restarts.note_batch(1, (2, 7))
    was_counting.append(restarts.is_counting)
    assert was_counting == [False, True, True, False]
    restarts.note_death(0, (2, 7))
    restarts.forget_batches()
    assert restarts.note_death(1, (2, 7)) is Decision.REPLACE
