"""The loaders under test, and how they are timed. Both by the same code: a loop that takes batches and does nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from cases import NUM_DISCARDED, NUM_WORKERS, Case

__all__ = ["EpochGap", "System", "Throughput", "make_swift", "make_torch"]

_MIN_GAPS = 5


class System(Protocol):
    """What is measured side by side with others; rests between measurements."""

    def measure(self, seconds: float) -> float:
        """Measure for about so long; return the figure."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class LoaderHandle:
    """A loader and the way to close it."""

    def __init__(self, loader: Any, close: Callable[[], None]) -> None:
        self.loader = loader
        self._close = close

    def close(self) -> None:
        """End the workers. The loader goes, too: torch's are ended when the last reference is."""
        self._close()
        del self.loader, self._close


def make_swift(case: Case, rng: str | None = "sample") -> LoaderHandle:
    from swift_loader import SwiftLoader

    loader = SwiftLoader(
        case.dataset_class,
        case.dataset_kwargs,
        batch_size=case.batch_size,
        worker_per_consumer=NUM_WORKERS,
        shuffle=True,
        seed=1,
        rng=rng,
    )
    return LoaderHandle(loader, loader.close)


def make_torch(case: Case) -> LoaderHandle:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        case.make_dataset(),
        case.batch_size,
        shuffle=True,
        num_workers=NUM_WORKERS,
        multiprocessing_context="spawn",
        persistent_workers=True,
        prefetch_factor=4,
    )
    return LoaderHandle(loader, lambda: None)


class Throughput:
    """Batches per second over as many epochs as it takes; goes on where the measurement before ended."""

    def __init__(self, handle: LoaderHandle) -> None:
        self._handle = handle
        self._batches = _endless(handle.loader)

    def measure(self, seconds: float) -> float:
        """Return batches per second, after dropping those that were ready before."""
        for _ in range(NUM_DISCARDED):
            next(self._batches)
        count = 0
        start = now = time.perf_counter()
        while now - start < seconds:
            next(self._batches)
            count += 1
            now = time.perf_counter()
        return count / (now - start)

    def close(self) -> None:
        """End the workers."""
        self._batches.close()
        self._handle.close()


class EpochGap:
    """Milliseconds from the last batch of an epoch to the first of the next."""

    def __init__(self, handle: LoaderHandle) -> None:
        self._handle = handle

    def measure(self, seconds: float) -> float:
        """Return the median over all epochs there is time for."""
        gaps: list[float] = []
        deadline = time.perf_counter() + seconds
        last = self._run_epoch()[1]
        while time.perf_counter() < deadline or len(gaps) < _MIN_GAPS:
            first, end = self._run_epoch()
            gaps.append(first - last)
            last = end
        return statistics.median(gaps) * 1000

    def _run_epoch(self) -> tuple[float, float]:
        """Take an epoch's batches; return when the first and when the last was there."""
        loader = self._handle.loader
        batches = iter(loader)
        next(batches)
        first = time.perf_counter()
        for _ in range(len(loader) - 1):
            next(batches)
        last = time.perf_counter()
        assert next(batches, None) is None, "an epoch has more batches than its loader says"
        return first, last

    def close(self) -> None:
        """End the workers."""
        self._handle.close()


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
