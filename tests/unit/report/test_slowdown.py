from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.report.slowdown import Slowdown

RUNNING = np.linspace(1, 4, 200)
NOISE = 0.02 * np.sin(np.arange(200) * 1.7)


@given(per_neighbour=st.floats(0.05, 0.9), scale=st.floats(1e-6, 10))
@settings(max_examples=60, deadline=None)
def test_the_slope_is_found_in_noise(per_neighbour: float, scale: float) -> None:
    cpu = scale * (1 + per_neighbour * (RUNNING - 1) + NOISE)
    slowdown = Slowdown.of(cpu, RUNNING, cores=8)
    assert slowdown.is_known
    assert slowdown.per_neighbour == pytest.approx(per_neighbour, rel=0.1, abs=0.02)


def test_work_that_only_needs_cores_is_not_slowed_down() -> None:
    assert Slowdown.of(1 + NOISE, RUNNING, cores=8) == Slowdown(0.0, is_known=True)


def test_more_neighbours_than_cores_do_not_count() -> None:
    cpu = 1 + 0.3 * (np.minimum(RUNNING, 2) - 1)
    assert Slowdown.of(cpu, RUNNING, cores=2).per_neighbour == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("running", [np.full(200, 2.0), RUNNING[:10]], ids=["always the same", "few batches"])
def test_batches_that_tell_nothing_give_an_unknown_slowdown(
    running: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    assert not Slowdown.of(np.ones(len(running)), running, cores=4).is_known
