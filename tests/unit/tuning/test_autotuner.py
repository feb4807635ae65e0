"""The autotuner over a loader whose clock and figures are made up."""

from __future__ import annotations

import numpy as np
import pytest

from swift_loader.metrics.observations import BATCH, Observations, Setup
from swift_loader.tuning.autotuner import Autotuner
from swift_loader.tuning.tuner import Machine

NS = 1_000_000_000


class FakeLoader:
    """A loader whose batches take a time that workers share. Each `step` is one batch."""

    def __init__(self, service_s: float, step_s: float, delay_s: float = 0.0) -> None:
        self.service_s = service_s
        self.step_s = step_s
        self.now_ns = 7 * NS
        self.num_workers = self.wanted = 1
        self.requests: list[int] = []
        self._delay_ns = int(delay_s * NS)
        self._effective_ns = 0
        self._records: list[tuple[int, int]] = []
        self._elapsed_s = 0.0
        self.tuner = Autotuner(1, lambda _: Machine(64, 32), self.observe, self.resize, lambda: self.now_ns)

    def resize(self, num_workers: int) -> None:
        self.wanted = num_workers
        self.requests.append(num_workers)
        self._effective_ns = self.now_ns + self._delay_ns

    def step(self) -> None:
        if self.now_ns >= self._effective_ns:
            self.num_workers = self.wanted
        took_s = max(self.step_s, self.service_s / self.num_workers)
        asked_ns = self.now_ns + int(self.step_s * NS)
        self.now_ns += int(took_s * NS)
        self._elapsed_s += took_s
        self._records.append((asked_ns, self.now_ns))
        self.tuner.check()

    def observe(self, num_batches: int) -> Observations:
        recent = self._records[-num_batches:]
        batches = np.zeros(len(recent), BATCH)
        asked, delivered = np.array(recent, np.int64).T
        batches["asked_ns"], batches["delivered_ns"] = asked, delivered
        batches["fetch_ns"] = int(self.service_s * NS)
        batches["run_delay_ns"] = -1
        setup = Setup(self.num_workers, 3 * self.num_workers, True, True, 8, "process", 64.0, 1, False)
        number = len(self._records)
        return Observations(setup, batches, (), number, 8 * number, self._elapsed_s, 0.0, 0.0, 0, {})

    def run(self, seconds: float) -> None:
        end_ns = self.now_ns + int(seconds * NS)
        while self.now_ns < end_ns:
            self.step()


def test_finds_enough_workers_and_stops() -> None:
    loader = FakeLoader(service_s=0.1, step_s=0.02)
    loader.run(60)
    assert loader.num_workers in (5, 6)
    num_requests = len(loader.requests)
    loader.run(600)
    assert len(loader.requests) == num_requests


def test_waits_until_the_new_workers_are_there() -> None:
    loader = FakeLoader(service_s=0.1, step_s=0.02, delay_s=20)
    loader.run(15)
    assert loader.requests == [5]
    loader.run(10)
    assert loader.requests == [5]
    assert loader.num_workers == 5


def test_tells_what_it_did_and_why() -> None:
    loader = FakeLoader(service_s=0.1, step_s=0.02)
    loader.run(60)
    first = loader.tuner.history[0]
    assert (first.before, first.after) == (1, 5)
    assert first.at_s == pytest.approx(3.5, abs=1.5)
    assert first.reason == "the loop waited 80.0% of its time with 1"
    assert loader.tuner.describe()[-1].startswith("now 5: with 5, the loop waits 0.0%")
