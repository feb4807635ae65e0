"""Where the next pass begins, and what a saved position is, for any sequence of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from swift_loader.sampling.plan import Plan, PlanSettings, Position, Uneven
from swift_loader.sampling.run import Run
from swift_loader.sampling.shuffle import OrderSettings

NUM_SAMPLES = 10
SETTINGS = PlanSettings(OrderSettings(1, shuffle=False, window=0, run_length=1), 2, 2, 0, Uneven.PAD, drop_last=False)


@dataclass
class Driver:
    """A run, driven as the loader drives it."""

    run: Run = field(default_factory=lambda: Run(SETTINGS.order, frozenset()))
    settings: PlanSettings = SETTINGS

    def begin(self) -> Position:
        position = self.run.next_begin(NUM_SAMPLES)
        self.settings, first_step = self.settings.resumed_at(position)
        self.run.begin_pass(position, Plan.of(NUM_SAMPLES, self.settings), first_step)
        return position

    def take(self, count: int = 1) -> None:
        assert self.run.this is not None
        self.run.this.num_steps += count


def test_passes_go_from_epoch_to_epoch() -> None:
    driver = Driver()
    for epoch in range(3):
        assert driver.begin() == Position(epoch, 0)
        driver.take(3)
        assert driver.run.position == Position(epoch, 10)


def test_the_position_follows_what_is_delivered() -> None:
    driver = Driver()
    driver.begin()
    found = []
    for _ in range(3):
        driver.take()
        found.append(driver.run.position.num_samples)
    assert found == [4, 8, 10]


def test_a_pass_that_was_left_is_where_the_run_stands_until_the_next_begins() -> None:
    driver = Driver()
    driver.begin()
    driver.take()
    assert driver.run.position == Position(0, 4)
    assert driver.begin() == Position(1, 0)
    assert driver.run.position == Position(1, 0)


def test_another_epoch_that_is_chosen_is_where_the_run_stands() -> None:
    driver = Driver()
    driver.begin()
    driver.take()
    driver.run.choose(5)
    assert driver.run.position == Position(5, 0)
    assert not driver.run.is_in_pass
    assert driver.begin() == Position(5, 0)
    assert driver.begin() == Position(6, 0)


def test_choosing_the_epoch_under_way_says_nothing_about_the_one_after() -> None:
    driver = Driver()
    driver.begin()
    driver.take()
    driver.run.choose(0)
    assert driver.run.position == Position(0, 4)
    assert driver.run.is_in_pass
    driver.take(2)
    assert driver.run.position == Position(0, 10)
    assert driver.begin() == Position(1, 0)


@pytest.mark.parametrize(
    ("saved", "chosen", "begins", "stands"),
    [
        (Position(3, 4), None, Position(3, 4), Position(3, 4)),
        (Position(3, 4), 3, Position(3, 4), Position(3, 4)),
        (Position(3, 4), 4, Position(4, 0), Position(4, 0)),
        (Position(3, 10), None, Position(4, 0), Position(3, 10)),
        (Position(3, 10), 3, Position(3, 10), Position(3, 10)),
        (Position(3, 10), 4, Position(4, 0), Position(4, 0)),
        (Position(3, 0), None, Position(3, 0), Position(3, 0)),
    ],
)
def test_a_restored_run_goes_on_as_the_table_says(
    saved: Position, chosen: int | None, begins: Position, stands: Position
) -> None:
    driver = Driver()
    driver.run.restore(saved.epoch, saved.num_samples)
    assert driver.run.position == saved
    if chosen is not None:
        driver.run.choose(chosen)
    assert driver.run.position == stands
    assert driver.begin() == begins
    assert driver.begin() == Position(begins.epoch + 1, 0)


def test_a_rank_without_a_part_of_the_last_step_is_at_the_end_when_the_loop_has_seen_it() -> None:
    driver = Driver(settings=PlanSettings(SETTINGS.order, 3, 3, 2, Uneven.EXACT, drop_last=False))
    driver.begin()
    driver.take()  # 9 of 10 samples; the last one is rank 0's
    assert not driver.run.is_in_pass
    assert driver.run.position == Position(0, 9)
    assert driver.run.this is not None
    driver.run.this.is_ended = True
    assert driver.run.position == Position(0, 10)
