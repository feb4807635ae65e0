from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.report.cores import Cores


def ends_of(cores: Cores) -> dict[int, float]:
    """Return when each job ends, in order."""
    ends: dict[int, float] = {}
    while (now := cores.next_end()) < float("inf"):
        job = cores.pop(now)
        assert job not in ends
        ends[job] = now
    return ends


def test_a_job_alone_runs_at_full_speed() -> None:
    cores = Cores(2)
    cores.add(10.0, 7, 3.0)
    assert ends_of(cores) == pytest.approx({7: 13.0})


def test_two_jobs_on_one_core_take_twice_as_long() -> None:
    cores = Cores(1)
    cores.add(0.0, 1, 1.0)
    cores.add(0.0, 2, 2.0)
    assert ends_of(cores) == pytest.approx({1: 2.0, 2: 3.0})


def test_a_job_that_comes_later_slows_the_first_one_from_then_on() -> None:
    cores = Cores(1)
    cores.add(0.0, 1, 2.0)
    cores.add(1.0, 2, 5.0)
    assert ends_of(cores)[1] == pytest.approx(3.0)


def test_other_programs_slow_one_job_down() -> None:
    cores = Cores(2, interference=1.25)
    cores.add(0.0, 1, 1.0)
    assert ends_of(cores) == pytest.approx({1: 1.25})


def test_other_programs_slow_many_jobs_down_more() -> None:
    cores = Cores(2, interference=1.25)
    for number in range(4):
        cores.add(0.0, number, 1.0)
    assert max(ends_of(cores).values()) == pytest.approx(2 * 1.25**2)


def test_jobs_that_are_bound_by_memory_slow_each_other_down() -> None:
    cores = Cores(2, slowdown=0.5)
    cores.add(0.0, 1, 1.0)
    cores.add(0.0, 2, 1.0)
    assert ends_of(cores) == pytest.approx({1: 1.5, 2: 1.5})


@given(
    lengths=st.lists(st.floats(0.01, 10), min_size=1, max_size=12),
    num_cores=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_no_work_is_lost_and_no_core_idles_while_jobs_wait(lengths: list[float], num_cores: int) -> None:
    cores = Cores(num_cores)
    for number, seconds in enumerate(lengths):
        cores.add(0.0, number, seconds)
    ends = ends_of(cores)
    last = max(ends.values())
    assert last >= max([*lengths, sum(lengths) / num_cores]) - 1e-9
    assert last <= sum(lengths) / num_cores + max(lengths) + 1e-9
    assert list(ends) == sorted(range(len(lengths)), key=lambda job: (lengths[job], job))
