"""Loaders use up nothing, whatever happens to them. See soak.py for longer runs."""

from __future__ import annotations

import pytest

from tests.support.figures import slope
from tests.support.helpers import exhaustive, slow
from tests.support.soak import MIN_PASSES, Soak


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_passes", "num_kills"), [slow(3, 1), exhaustive(2 * MIN_PASSES, 20)])
def test_everything_at_once_for_a_while_uses_up_nothing(num_passes: int, num_kills: int) -> None:
    soak = Soak(seed=1)

    def is_enough() -> bool:
        return len(soak.figures.rows) >= num_passes and soak.kills.total() >= num_kills and soak.counts["breaks"] > 0

    soak.run(0, is_enough)


def test_a_leak_is_caught() -> None:
    soak = Soak(seed=2)
    for number in range(40):
        soak.figures.closed_mb.append((number, 100.0 + 1.5 * number))
    with pytest.raises(AssertionError, match=r"trainer without a loader: 1\.50 MB more after each epoch"):
        soak.figures.check()


def test_slopes_are_common_to_groups_of_different_levels() -> None:
    points = [(x, x % 3, 100.0 * (x % 3) + 0.5 * x) for x in range(30)]
    assert slope(points) == pytest.approx(0.5)
    assert slope([(1, 0, 5.0), (2, 1, 50.0)]) == 0
