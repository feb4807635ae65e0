from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.report.cores import Cores


def ends_of(cores: Cores) -> list[tuple[float, int]]:
    """Return when each job ends, in order."""
    ends = []
    while (now := cores.next_end()) < float("inf"):
        ends.append((now, cores.pop(now)))
    return ends


def test_a_job_alone_runs_at_full_speed() -> None:
    cores = Cores(2)
    cores.add(10.0, 7, 3.0)
    assert ends_of(cores) == [(pytest.approx(13.0), 7)]


def test_two_jobs_on_one_core_take_twice_as_long() -> None:
    cores = Cores(1)
    cores.add(0.0, 1, 1.0)
    cores.add(0.0, 2, 2.0)
    assert ends_of(cores) == [(pytest.approx(2.0), 1), (pytest.approx(3.0), 2)]


def test_a_job_that_comes_later_slows_the_first_one_from_then_on() -> None:
    cores = Cores(1)
    cores.add(0.0, 1, 2.0)
    cores.add(1.0, 2, 5.0)
    assert ends_of(cores)[0] == (pytest.approx(3.0), 1)


def test_other_programs_take_their_part() -> None:
    cores = Cores(1, foreign=1.0)
    cores.add(0.0, 1, 1.0)
    assert ends_of(cores) == [(pytest.approx(2.0), 1)]


def test_jobs_that_are_bound_by_memory_slow_each_other_down() -> None:
    cores = Cores(2, slowdown=0.5)
    cores.add(0.0, 1, 1.0)
    cores.add(0.0, 2, 1.0)
    assert [end for end, _ in ends_of(cores)] == [pytest.approx(1.5)] * 2


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
    assert sorted(job for _, job in ends) == list(range(len(lengths)))
    last = ends[-1][0]
    assert last >= max(max(lengths), sum(lengths) / num_cores) - 1e-9
    assert last <= sum(lengths) / num_cores + max(lengths) + 1e-9
    assert [job for _, job in ends] == sorted(range(len(lengths)), key=lambda job: (lengths[job], job))
