from __future__ import annotations

from swift_loader.samplers.passes import Passes


def finished(passes: Passes) -> int:
    this = passes.begin()
    this.advance(this.position + 10, at_end=True)
    return this.epoch


def test_epochs_follow_each_other() -> None:
    passes = Passes()
    assert [finished(passes) for _ in range(3)] == [0, 1, 2]
    assert passes.epoch == 3


def test_a_pass_that_was_left_is_begun_again() -> None:
    passes = Passes()
    passes.begin().advance(4, at_end=False)
    this = passes.begin()
    assert (this.epoch, this.position) == (0, 0)


def test_the_chosen_epoch_is_the_next_one_only() -> None:
    passes = Passes()
    passes.choose(7)
    assert passes.epoch == 7
    assert [finished(passes), finished(passes)] == [7, 8]
    passes.choose(8)
    assert finished(passes) == 8


def test_the_epoch_of_the_running_pass_chooses_nothing() -> None:
    passes = Passes()
    this = passes.begin()
    passes.choose(0)
    this.advance(10, at_end=True)
    assert passes.begin().epoch == 1


def test_a_running_pass_is_what_is_saved_whatever_is_chosen() -> None:
    passes = Passes()
    this = passes.begin()
    this.advance(4, at_end=False)
    passes.choose(5)
    assert passes.current is this
    assert passes.epoch == 0
    this.end()
    assert (passes.current.epoch, passes.current.position) == (5, 0)


def test_an_iterator_left_behind_does_not_move_the_position() -> None:
    passes = Passes()
    left = passes.begin()
    now = passes.begin()
    now.advance(2, at_end=False)
    left.advance(8, at_end=True)
    assert passes.current is now
    assert passes.current.position == 2


def test_a_restored_position_is_where_the_next_pass_begins() -> None:
    passes = Passes()
    passes.restore(3, 5, at_end=False)
    assert (passes.current.epoch, passes.current.position, passes.epoch) == (3, 5, 3)
    passes.choose(3)
    assert (passes.current.epoch, passes.current.position) == (3, 5)
    this = passes.begin()
    assert (this.epoch, this.position) == (3, 5)


def test_another_chosen_epoch_discards_a_restored_position() -> None:
    passes = Passes()
    passes.restore(3, 5, at_end=False)
    passes.choose(4)
    assert (passes.current.epoch, passes.current.position) == (4, 0)
    this = passes.begin()
    assert (this.epoch, this.position) == (4, 0)


def test_after_a_restored_end_comes_the_next_epoch_or_nothing_of_the_chosen_same_one() -> None:
    passes = Passes()
    passes.restore(3, 10, at_end=True)
    assert passes.epoch == 4
    passes.choose(3)
    this = passes.begin()
    assert (this.epoch, this.position, this.at_end) == (3, 10, True)
    passes.restore(3, 10, at_end=True)
    assert passes.begin().epoch == 4
