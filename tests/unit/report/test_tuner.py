"""The tuner in a simulated world: rates follow from the load, the workers and the cores, with noise."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.report.tuning import Machine, Tuner, TunerState, Window

WINDOW_S = 3.0
MIN_BATCHES = 8
SEARCH_S = 60.0
"""A search must be over after this time."""


@dataclass(frozen=True)
class Load:
    """What a batch costs."""

    step_s: float
    io_s: float = 0.0
    cpu_s: float = 0.0
    trainer_cpu_s: float = 0.0
    rivalry: float = 0.0
    """By how much a batch takes longer for each further worker that is busy: memory bandwidth, a disk."""

    def service_s(self, num_busy: float) -> float:
        return (self.io_s + self.cpu_s) * (1 + self.rivalry * max(0.0, num_busy - 1))

    def rate(self, num_workers: int, num_cores: float) -> float:
        """Solve for the rate: it depends on how many workers are busy, which depends on the rate."""
        low, high = 0.0, min(1 / self.step_s, num_cores / max(self.cpu_s + self.trainer_cpu_s, 1e-9))
        for _ in range(60):
            rate = (low + high) / 2
            is_possible = rate * self.service_s(min(num_workers, rate * self.service_s(num_workers))) <= num_workers
            low, high = (rate, high) if is_possible else (low, rate)
        return low


class World:
    """A loader with a load."""

    def __init__(self, load: Load, machine: Machine, noise: float = 0.0, seed: int = 0) -> None:
        self.load = load
        self.machine = machine
        self.tuner = Tuner()
        self.num_workers = 1
        self.resizes: list[float] = []
        """When the number of workers changed."""
        self.now_s = 0.0
        self._noise = noise
        self._random = random.Random(seed)

    def window(self) -> Window:
        rate = self.load.rate(self.num_workers, self.machine.num_cores) * self._random.gauss(1, self._noise)
        busy = rate * self.load.service_s(self.num_workers)
        return Window(
            self.num_workers,
            max(0.0, 1 / rate - self.load.step_s),
            self.load.step_s,
            self.load.service_s(busy) * self._random.gauss(1, self._noise),
            self.load.cpu_s,
            self.load.trainer_cpu_s,
        )

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            window = self.window()
            wanted = self.tuner.decide(window, self.machine)
            self.now_s += max(WINDOW_S, MIN_BATCHES / window.rate)
            if wanted != self.num_workers:
                assert 1 <= wanted <= self.machine.max_workers
                self.num_workers = wanted
                self.resizes.append(self.now_s)

    def share_of_best(self) -> float:
        rates = [self.load.rate(number, self.machine.num_cores) for number in range(1, self.machine.max_workers + 1)]
        return self.load.rate(self.num_workers, self.machine.num_cores) / max(rates)

    def resizes_after(self, time_s: float) -> int:
        return sum(when_s > time_s for when_s in self.resizes)


LOADS = {
    "model-bound": Load(step_s=0.1, cpu_s=0.01),
    "I/O-bound": Load(step_s=0.02, io_s=0.15),
    "CPU-bound": Load(step_s=0.001, cpu_s=0.05),
    "CPU and I/O": Load(step_s=0.01, cpu_s=0.02, io_s=0.1),
    "the trainer needs cores": Load(step_s=0.02, cpu_s=0.05, trainer_cpu_s=0.02),
    "memory-bound": Load(step_s=0.001, cpu_s=0.02, rivalry=0.3),
    "a slow disk": Load(step_s=0.001, io_s=0.05, rivalry=0.9),
    "balanced": Load(step_s=0.05, io_s=0.05),
    "tiny batches": Load(step_s=0.0001, cpu_s=0.0001, trainer_cpu_s=0.00008),
}


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_finds_nearly_the_best_number_in_a_minute_and_stays_there(load: Load, noise: float) -> None:
    world = World(load, Machine(num_cores=8, max_workers=32), noise)
    world.run(SEARCH_S)
    assert world.tuner.state is TunerState.SETTLED
    assert world.share_of_best() > 0.95
    world.run(600)
    assert world.share_of_best() > 0.95
    assert world.resizes_after(SEARCH_S) <= 3


@pytest.mark.slow
@given(
    step_s=st.floats(0.001, 0.5),
    io_s=st.floats(0, 0.5),
    cpu_s=st.floats(0.0001, 0.5),
    trainer_cpu_s=st.floats(0, 0.1),
    num_cores=st.integers(1, 64),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_is_within_a_twentieth_of_the_best_for_any_load(
    step_s: float, io_s: float, cpu_s: float, trainer_cpu_s: float, num_cores: int, seed: int
) -> None:
    load = Load(step_s, io_s, cpu_s, trainer_cpu_s)
    world = World(load, Machine(num_cores, max_workers=64), noise=0.005, seed=seed)
    world.run(SEARCH_S)
    assert world.share_of_best() > 0.95
    world.run(600)
    assert world.share_of_best() > 0.95
    assert world.resizes_after(SEARCH_S) <= 3


def test_follows_a_load_that_changes_twice() -> None:
    world = World(LOADS["model-bound"], Machine(num_cores=8, max_workers=32), noise=0.01)
    world.run(SEARCH_S)
    assert world.num_workers == 1
    for load in (LOADS["I/O-bound"], LOADS["CPU-bound"]):
        world.load = load
        world.run(SEARCH_S)
        assert world.share_of_best() > 0.95


def test_notices_a_load_that_changes_as_the_search_ends() -> None:
    world = World(LOADS["CPU-bound"], Machine(num_cores=2, max_workers=16))
    while world.tuner.state is not TunerState.SETTLED:
        world.run(WINDOW_S)
    assert world.num_workers == 2  # the last try was 3
    world.load = LOADS["I/O-bound"]
    world.run(SEARCH_S)
    assert world.share_of_best() > 0.95


@pytest.mark.parametrize("first", [1, 2])
def test_gives_workers_back_when_the_load_needs_far_fewer_during_the_search(first: int) -> None:
    world = World(LOADS["I/O-bound"], Machine(num_cores=8, max_workers=32))
    world.num_workers = first
    world.run(WINDOW_S / 2)
    assert world.tuner.state is TunerState.SEARCHING
    assert world.num_workers >= 8
    world.load = LOADS["model-bound"]
    world.run(SEARCH_S)
    assert world.num_workers <= 2


def test_gives_workers_back_when_the_load_needs_far_fewer() -> None:
    world = World(LOADS["I/O-bound"], Machine(num_cores=8, max_workers=32), noise=0.01)
    world.run(SEARCH_S)
    before = world.num_workers
    world.load = replace(LOADS["I/O-bound"], io_s=0.015)
    world.run(SEARCH_S)
    assert world.num_workers < before / 2
    assert world.share_of_best() > 0.95


def test_a_loop_that_does_not_wait_keeps_its_workers() -> None:
    world = World(LOADS["model-bound"], Machine(num_cores=8, max_workers=32), noise=0.02)
    world.run(1200)
    assert world.resizes == []


def test_false_alarms_become_rarer() -> None:
    """A load whose times jump up and down, but that no number of workers helps."""
    world = World(LOADS["CPU-bound"], Machine(num_cores=2, max_workers=8), noise=0.01)
    world.run(SEARCH_S)
    calm, rough = LOADS["CPU-bound"], replace(LOADS["CPU-bound"], cpu_s=0.08)
    counts = []
    for _ in range(6):
        before = len(world.resizes)
        for load in [rough, calm] * 4:
            world.load = load
            world.run(3 * WINDOW_S)
        counts.append(len(world.resizes) - before)
    assert counts[-1] <= counts[0]
    assert counts[-1] <= 2
