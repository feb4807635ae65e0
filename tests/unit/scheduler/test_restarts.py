from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.scheduler.restarts import TEMPLATE, Decision, Restarts


def test_without_a_budget_the_first_death_is_one_too_many() -> None:
    assert Restarts(0).note_death(0, (0, 5)) is Decision.TOO_MANY


def test_a_worker_id_is_given_up_when_its_budget_is_spent_without_a_batch() -> None:
    restarts = Restarts(3)
    assert [restarts.note_death(1, None) for _ in range(4)] == [Decision.REPLACE] * 3 + [Decision.TOO_MANY]
    assert restarts.num_in_a_row(1) == 4
    assert restarts.num_in_a_row(0) == 0


def test_a_batch_of_the_same_worker_id_makes_up_for_its_deaths() -> None:
    restarts = Restarts(1)
    for step in range(20):
        assert restarts.note_death(0, (0, step)) is Decision.REPLACE
        restarts.note_batch(0, (0, step))


def test_a_batch_from_elsewhere_does_not_but_for_the_template() -> None:
    restarts = Restarts(1)
    for step, (worker_id, decision) in enumerate([(0, Decision.TOO_MANY), (TEMPLATE, Decision.REPLACE)]):
        restarts.note_death(worker_id, None)
        restarts.note_batch(1, (0, step))
        assert restarts.note_death(worker_id, None) is decision


def test_a_batch_that_ends_two_workers_is_to_blame_whatever_came_in_between() -> None:
    restarts = Restarts(3)
    assert restarts.note_death(0, (2, 7)) is Decision.REPLACE
    restarts.note_batch(0, (2, 6))
    assert restarts.note_death(1, (2, 7)) is Decision.BATCH_IS_TO_BLAME


def test_a_batch_that_was_built_after_all_was_not_to_blame() -> None:
    restarts = Restarts(3)
    restarts.note_death(0, (2, 7))
    restarts.note_batch(1, (2, 7))
    assert restarts.note_death(0, (2, 7)) is Decision.REPLACE


@given(budget=st.integers(0, 4), worker_ids=st.lists(st.integers(0, 3), max_size=40))
def test_a_worker_is_replaced_as_often_as_its_budget_says(budget: int, worker_ids: list[int]) -> None:
    restarts = Restarts(budget)
    for number, worker_id in enumerate(worker_ids):
        expected = worker_ids[: number + 1].count(worker_id) <= budget
        assert (restarts.note_death(worker_id, None) is Decision.REPLACE) is expected


def test_the_state_can_be_read() -> None:
    restarts = Restarts(3)
    restarts.note_death(0, None)
    assert repr(restarts) == "<Restarts 1 in a row, budget 3>"


def test_deaths_are_counted_until_all_are_made_up_for() -> None:
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


def test_a_batch_that_means_another_one_now_is_not_to_blame() -> None:
    restarts = Restarts(3)
    restarts.note_death(0, (2, 7))
    restarts.forget_batches()
    assert restarts.note_death(1, (2, 7)) is Decision.REPLACE


@given(budget=st.integers(0, 3), events=st.lists(st.tuples(st.booleans(), st.integers(-1, 2), st.integers(0, 3))))
def test_deaths_count_only_until_a_batch_forgives_them(budget: int, events: list[tuple[bool, int, int]]) -> None:
    """Compares with the rules, read off the history: each event is a batch or a death, a worker id and a batch."""
    restarts = Restarts(budget)
    for number, (is_batch, worker_id, batch) in enumerate(events):
        if is_batch:
            restarts.note_batch(worker_id, batch)
            continue
        decision = restarts.note_death(worker_id, batch)
        before = events[: number + 1]
        in_a_row = by_batch = 0
        for was_batch, where, which in before:
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
