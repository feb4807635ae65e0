"""How many workers keep a step fed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.doctor.cores import available_cores, cores_of
from swift_loader.doctor.rules.workers import workers_needed

TIMES = st.floats(1e-6, 10.0)
SHARES = st.floats(0.0, 1.0)
CORES = st.floats(0.5, 128.0)


@pytest.mark.parametrize(
    ("batch_s", "cpu_share", "step_s", "num_cores", "expected", "is_fed"),
    [
        (0.010, 1.0, 0.100, 4.0, 1, True),  # one worker is fast enough
        (0.100, 1.0, 0.050, 4.0, 3, True),  # two, and a reserve
        (0.100, 1.0, 0.010, 4.0, 4, False),  # a worker per core, and that isn't enough
        (0.100, 0.1, 0.010, 4.0, 11, True),  # waiting samples need no core of their own
        (0.100, 0.0, 0.010, 1.0, 11, True),  # they may need none at all
        (0.100, 1.0, 0.300, 0.5, 1, True),  # a cgroup allows half a core
    ],
)
def test_workers_are_counted_by_what_they_build_and_what_the_cores_allow(
    batch_s: float, cpu_share: float, step_s: float, num_cores: float, expected: int, is_fed: bool
) -> None:
    workers = workers_needed(batch_s, cpu_share, step_s, num_cores)
    assert workers.num_workers == expected
    assert workers.is_fed is is_fed


@given(TIMES, SHARES, TIMES, CORES)
def test_a_step_that_can_not_be_fed_is_longer_than_what_the_workers_say(
    batch_s: float, cpu_share: float, step_s: float, num_cores: float
) -> None:
    workers = workers_needed(batch_s, cpu_share, step_s, num_cores)
    assert workers.num_workers >= 1
    assert workers.fed_step_s >= batch_s * cpu_share / num_cores
    assert workers.is_fed == (workers.fed_step_s <= step_s)


@pytest.mark.parametrize(
    ("num_cores", "limit", "expected"),
    [
        (8, "max 100000", 8.0),
        (8, "150000 100000", 1.5),
        (2, "800000 100000", 2.0),
        (4, "-1 100000", 4.0),
        (4, "", 4.0),
        (4, "max ", 4.0),
        (4, "100 0", 4.0),
    ],
)
def test_a_cgroup_limits_the_cores(num_cores: int, limit: str, expected: float) -> None:
    assert cores_of(num_cores, limit) == expected


def test_this_machine_has_a_core() -> None:
    assert available_cores() > 0
