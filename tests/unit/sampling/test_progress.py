"""Where the next pass begins, and what a saved position is, for any sequence of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from swift_loader.sampling.plan import Plan, PlanSettings, Position, Uneven
from swift_loader.sampling.run import Progress
from swift_loader.sampling.shuffle import OrderSettings

NUM_SAMPLES = 10
SETTINGS = PlanSettings(OrderSettings(1, shuffle=False, window=0, run_length=1), 2, 2, 0, Uneven.PAD, drop_last=False)


@dataclass
class Run:
    """A progress, driven as the loader drives it."""

    progress: Progress = field(default_factory=Progress)
    settings: PlanSettings = SETTINGS
    num_steps: int = 0

    def begin(self) -> Position:
        position = self.progress.next_begin(NUM_SAMPLES)
        self.settings, self.num_steps = self.settings.resumed_at(position)
        self.progress.begin(position, Plan.of(NUM_SAMPLES, self.settings), self.num_steps)
        return position

    def take(self, count: int = 1) -> None:
        for _ in range(count):
            self.num_steps += 1
            self.progress.advance(self.num_steps)


def test_passes_go_from_epoch_to_epoch() -> None:
    run = Run()
    for epoch in range(3):
        assert run.begin() == Position(epoch, 0)
        run.take(3)
        assert run.progress.position == Position(epoch, 10)


def test_the_position_follows_what_is_delivered() -> None:
    run = Run()
    run.begin()
    found = []
    for _ in range(3):
        run.take()
        found.append(run.progress.position.num_samples)
    assert found == [4, 8, 10]


def test_a_pass_that_was_left_is_where_the_run_stands_until_the_next_begins() -> None:
    run = Run()
    run.begin()
    run.take()
    assert run.progress.position == Position(0, 4)
    assert run.begin() == Position(1, 0)
    assert run.progress.position == Position(1, 0)


def test_another_epoch_that_is_chosen_is_where_the_run_stands() -> None:
    run = Run()
    run.begin()
    run.take()
    run.progress.choose_epoch(5)
    assert run.progress.position == Position(5, 0)
    assert not run.progress.is_in_pass
    assert run.begin() == Position(5, 0)
    assert run.begin() == Position(6, 0)


def test_choosing_the_epoch_under_way_says_nothing_about_the_one_after() -> None:
    run = Run()
    run.begin()
    run.take()
    run.progress.choose_epoch(0)
    assert run.progress.position == Position(0, 4)
    assert run.progress.is_in_pass
    run.take(2)
    assert run.progress.position == Position(0, 10)
    assert run.begin() == Position(1, 0)


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
    run = Run()
    run.progress.restore(saved)
    assert run.progress.position == saved
    if chosen is not None:
        run.progress.choose_epoch(chosen)
    assert run.progress.position == stands
    assert run.begin() == begins
    assert run.begin() == Position(begins.epoch + 1, 0)


def test_a_rank_without_a_part_of_the_last_step_is_at_the_end_when_the_loop_has_seen_it() -> None:
    run = Run(settings=PlanSettings(SETTINGS.order, 3, 3, 2, Uneven.EXACT, drop_last=False))
    run.begin()
    run.take()  # 9 of 10 samples; the last one is rank 0's
    assert not run.progress.is_in_pass
    assert run.progress.position == Position(0, 9)
    run.progress.end()
    assert run.progress.position == Position(0, 10)
