from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.worker.sample_timer import SampleTimer
from swift_loader.worker.seeding import Rng, Seeding

LONG_NS, SHORT_NS = 25_000, 1_000


class Clock:
    """A clock that only the dataset moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", fake)
    return fake


class Dataset:
    def __init__(self, clock: Clock, took_ns: Callable[[Any], int]) -> None:
        self._clock = clock
        self._took_ns = took_ns

    def __getitem__(self, key: Any) -> Any:
        self._clock.now_ns += self._took_ns(key)
        if key == "bad":
            raise ValueError(key)
        return key


def test_the_slowest_sample_is_found_by_its_index(clock: Clock) -> None:
    timer, samples = SampleTimer(), list[Any]()
    dataset = Dataset(clock, lambda key: {5: 900}.get(key, 100))
    timer.fetch(dataset, [3, 5, 7], samples, Seeding(Rng.NONE))
    assert samples == [3, 5, 7]
    assert (timer.slow_index, timer.slow_ns) == (5, 900)


def test_a_second_part_of_a_batch_keeps_the_slowest_of_the_first(clock: Clock) -> None:
    timer, samples = SampleTimer(), list[Any]()
    dataset = Dataset(clock, lambda key: {3: 900}.get(key, 100))
    with pytest.raises(ValueError, match="bad"):
        timer.fetch(dataset, [3, 4, "bad", 8], samples, Seeding(Rng.NONE))
    timer.fetch(dataset, [8], samples, Seeding(Rng.NONE))
    assert samples == [3, 4, 8]
    assert (timer.slow_index, timer.slow_ns) == (3, 900)


@pytest.mark.parametrize("key", ["name", 2**70, (1, 2), True])
def test_a_key_that_is_no_index_is_not_told(clock: Clock, key: Any) -> None:
    timer = SampleTimer()
    timer.fetch(Dataset(clock, lambda _: 900), [key], [], Seeding(Rng.NONE))
    assert timer.slow_ns == 0


def test_long_samples_are_measured_in_each_batch() -> None:
    timer = SampleTimer()
    for _ in range(200):
        timer.note_batch(LONG_NS * 8, 8)
        assert timer.is_due


def test_short_samples_are_measured_in_one_batch_of_64() -> None:
    timer = SampleTimer()
    due = [timer.is_due]
    for _ in range(128):
        timer.note_batch(SHORT_NS * 8, 8)
        due.append(timer.is_due)
    assert [number for number, is_due in enumerate(due) if is_due] == [0, 64, 128]


def test_measuring_takes_one_reading_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[int] = []

    def count() -> int:
        readings.append(0)
        return len(readings)

    monkeypatch.setattr(time, "perf_counter_ns", count)
    SampleTimer().fetch(list(range(50)), list(range(50)), [], Seeding(Rng.NONE))
    assert len(readings) == 51
