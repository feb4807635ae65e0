"""Training loops that sleep for a fixed time per step, over swift_loader's and torch's loaders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common.turns import endless

from swift_loader import SwiftLoader
from tuned.loads import BATCH_SIZE

_WARM_UP = 0.4
"""Share of a turn that comes before it, and doesn't count."""

Dataset = tuple[type[Any], dict[str, Any]]
"""A class and its arguments."""


@dataclass(slots=True)
class Course:
    """What happened in a loop over a loader that chooses its workers."""

    times: list[float] = field(default_factory=list)
    """When each batch came, in seconds since the beginning."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    """When the number of workers became another one."""

    def follow(self, loader: SwiftLoader, step_s: float, seconds: float) -> None:
        """Run the loop for some time. Time goes on from where it was."""
        begin = time.perf_counter() - (self.times[-1] if self.times else 0.0)
        end_s = (self.times[-1] if self.times else 0.0) + seconds
        batches = endless(loader)
        while True:
            next(batches)
            now_s = time.perf_counter() - begin
            self.times.append(now_s)
            number = loader.worker_per_consumer
            if not self.changes or number != self.changes[-1][1]:
                self.changes.append((now_s, number))
            if now_s >= end_s:
                return
            time.sleep(step_s)

    def seconds_until(self, rate: float, *, since_s: float = 0.0, window_s: float = 3.0) -> float:
        """Return when the loop was first as fast, over a window that begins then; infinite if it never was."""
        times = np.array(self.times)
        begins = times[times >= since_s]
        counts = np.searchsorted(times, begins + window_s) - np.searchsorted(times, begins)
        is_fast = (counts / window_s >= rate) & (begins + window_s <= times[-1])
        return float(begins[is_fast.argmax()] - since_s) if is_fast.any() else float("inf")

    def num_resizes(self, since_s: float) -> int:
        """Return how often the number of workers has changed from then on."""
        return sum(at_s > since_s for at_s, _ in self.changes[1:])


def swift_loader_of(dataset: Dataset, num_workers: Any) -> SwiftLoader:
    """Return a loader. The number of workers may be "auto"."""
    made, kwargs = dataset
    return SwiftLoader(made, kwargs, batch_size=BATCH_SIZE, nearby_shuffle=0, seed=1, worker_per_consumer=num_workers)


def rate_with(system: str, dataset: Dataset, num_workers: int, step_s: float, seconds: float) -> float:
    """Return batches per second of a new loader. It warms up before it is timed."""
    with _SYSTEMS[system](dataset, num_workers) as loader:
        return rate_of(loader, step_s, seconds)


def rate_of(loader: Any, step_s: float, seconds: float) -> float:
    """Return batches per second in a new pass, which warms up before it is timed."""
    batches = endless(loader)
    _spin(batches, step_s, _WARM_UP * seconds)
    num_batches, elapsed_s = _spin(batches, step_s, seconds)
    return num_batches / elapsed_s


@contextmanager
def _swift(dataset: Dataset, num_workers: int) -> Iterator[Any]:
    with swift_loader_of(dataset, num_workers) as loader:
        yield loader


@contextmanager
def _torch(dataset: Dataset, num_workers: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    made, kwargs = dataset
    yield DataLoader(made(**kwargs), BATCH_SIZE, shuffle=True, num_workers=num_workers, multiprocessing_context="fork")


_SYSTEMS = {"swift_loader": _swift, "torch": _torch}


def _spin(batches: Iterator[Any], step_s: float, seconds: float) -> tuple[int, float]:
    began = time.perf_counter()
    num_batches = 0
    while (elapsed_s := time.perf_counter() - began) < seconds:
        next(batches)
        time.sleep(step_s)
        num_batches += 1
    return num_batches, elapsed_s
