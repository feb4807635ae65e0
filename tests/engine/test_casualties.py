from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.engine.casualties import TEMPLATE, Casualties, Verdict


def test_without_a_budget_the_first_death_is_one_too_many() -> None:
    assert Casualties(0).note_death(0, (0, 5)) is Verdict.TOO_MANY


def test_a_place_is_given_up_when_its_budget_is_spent_without_a_batch() -> None:
    casualties = Casualties(3)
    assert [casualties.note_death(1, None) for _ in range(4)] == [Verdict.REPLACE] * 3 + [Verdict.TOO_MANY]
    assert casualties.num_in_a_row(1) == 4
    assert casualties.num_in_a_row(0) == 0


def test_a_batch_from_the_place_makes_up_for_its_deaths() -> None:
    casualties = Casualties(1)
    for step in range(20):
        assert casualties.note_death(0, (0, step)) is Verdict.REPLACE
        casualties.note_batch(0, (0, step))


def test_a_batch_from_elsewhere_does_not_but_for_the_template() -> None:
    casualties = Casualties(1)
    for step, (place, verdict) in enumerate([(0, Verdict.TOO_MANY), (TEMPLATE, Verdict.REPLACE)]):
        casualties.note_death(place, None)
        casualties.note_batch(1, (0, step))
        assert casualties.note_death(place, None) is verdict


def test_a_batch_that_ends_two_workers_is_to_blame_whatever_came_in_between() -> None:
    casualties = Casualties(3)
    assert casualties.note_death(0, (2, 7)) is Verdict.REPLACE
    casualties.note_batch(0, (2, 6))
    assert casualties.note_death(1, (2, 7)) is Verdict.BATCH_IS_TO_BLAME


def test_a_batch_that_was_built_after_all_was_not_to_blame() -> None:
    casualties = Casualties(3)
    casualties.note_death(0, (2, 7))
    casualties.note_batch(1, (2, 7))
    assert casualties.note_death(0, (2, 7)) is Verdict.REPLACE


@given(budget=st.integers(0, 4), places=st.lists(st.integers(0, 3), max_size=40))
def test_a_place_is_replaced_as_often_as_its_budget_says(budget: int, places: list[int]) -> None:
    casualties = Casualties(budget)
    for number, place in enumerate(places):
        expected = places[: number + 1].count(place) <= budget
        assert (casualties.note_death(place, None) is Verdict.REPLACE) is expected


def test_the_state_can_be_read() -> None:
    casualties = Casualties(3)
    casualties.note_death(0, None)
    assert repr(casualties) == "<Casualties 1 in a row, budget 3>"
