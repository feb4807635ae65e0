from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from swift_loader.tuning.room import first_number, room_for
from tests.support.simulated import Load, observed, setup_of

SETUP = replace(setup_of(Load(num_workers=1, max_in_flight=10)), num_cores=16.0)


@pytest.mark.parametrize(("build_s", "ranks", "expected"), [(0.01, 1, 1), (0.2, 1, 4), (inf, 1, 16), (inf, 4, 4)])
def test_the_first_number_follows_from_the_trial_batch_and_the_cores_of_the_rank(
    build_s: float, ranks: int, expected: int
) -> None:
    setup = replace(SETUP, is_in_flight_chosen=True, world_size_here=ranks)
    assert first_number(setup, build_s) == expected


@pytest.mark.parametrize("given", [1, 3])
def test_a_queue_that_was_given_limits_the_workers(given: int) -> None:
    setup = replace(SETUP, is_in_flight_chosen=False, max_in_flight=given)
    assert first_number(setup, inf) == given
    observations = replace(observed(Load()), setup=setup)
    assert room_for(observations).max_workers == given


def test_a_queue_that_was_chosen_limits_nothing() -> None:
    observations = replace(observed(Load()), setup=replace(SETUP, is_in_flight_chosen=True, max_in_flight=2))
    assert room_for(observations).max_workers > 2
