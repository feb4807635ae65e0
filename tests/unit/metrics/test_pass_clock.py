from __future__ import annotations

import time

import pytest

from swift_loader.metrics.metrics import PassClock

MS = 1_000_000


class CpuTime:
    """A fake of `time.process_time_ns`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> CpuTime:
    clock = CpuTime()
    monkeypatch.setattr(time, "process_time_ns", clock)
    return clock


def test_time_between_two_passes_does_not_count(cpu: CpuTime) -> None:
    clock = PassClock()
    clock.begin(0)
    cpu.now_ns = 4 * MS
    clock.end(10 * MS)
    cpu.now_ns = 100 * MS  # validation
    clock.begin(500 * MS)
    cpu.now_ns = 101 * MS
    clock.end(520 * MS)
    assert (clock.elapsed_s, clock.cpu_s) == (0.030, 0.005)


def test_a_pass_that_the_loop_left_ends_with_its_last_next(cpu: CpuTime) -> None:
    clock = PassClock()
    clock.begin(0)
    cpu.now_ns = 3 * MS
    clock.note_next(7 * MS)
    cpu.now_ns = 50 * MS
    clock.end()
    assert (clock.elapsed_s, clock.cpu_s) == (0.007, 0.003)


def test_ending_a_pass_twice_counts_it_once(cpu: CpuTime) -> None:
    clock = PassClock()
    clock.end()
    clock.begin(0)
    clock.end(8 * MS)
    clock.end(90 * MS)
    assert clock.elapsed_s == 0.008
