"""The loaders under test, and their timing. The same code times both: a loop that takes batches and does nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
from common.turns import NUM_DISCARDED, endless, rate_of

from transport.cases import NUM_WORKERS, Case

_MIN_GAPS = 5


class LoaderHandle:
    """A loader and the function that closes it."""

    def __init__(self, loader: Any, close: Callable[[], None]) -> None:
        self.loader = loader
        self._close = close

    def close(self) -> None:
        """Stop the workers, and drop the loader: torch stops its workers when the last reference to the loader dies."""
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


def make_torch(case: Case, context: str = "spawn") -> LoaderHandle:
    from torch.utils.data import DataLoader

    return _make(DataLoader, case, multiprocessing_context=context, prefetch_factor=4)


def make_drop_in(case: Case) -> LoaderHandle:
    from swift_loader import DataLoader

    return _make(DataLoader, case)


def _make(kind: type[Any], case: Case, **arguments: Any) -> LoaderHandle:
    loader = kind(
        case.make_dataset(),
        case.batch_size,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        **arguments,
    )
    return LoaderHandle(loader, lambda: None)


class Throughput:
    """Measures batches per second, over as many epochs as needed. Continues where the last measurement ended."""

    def __init__(self, handle: LoaderHandle) -> None:
        self._handle = handle
        self._batches = endless(handle.loader)

    def measure(self, seconds: float) -> float:
        """Return batches per second."""
        return rate_of(self._batches, seconds)[0]

    def close(self) -> None:
        """Stop the workers."""
        self._batches.close()
        self._handle.close()


class Costs(Throughput):
    """Measures CPU time besides: that of this process and of the workers."""

    def __init__(self, handle: LoaderHandle) -> None:
        others = set(psutil.Process().children(recursive=True))
        super().__init__(handle)
        next(self._batches)
        self._processes = [psutil.Process(), *set(psutil.Process().children(recursive=True)) - others]

    def measure(self, seconds: float) -> tuple[float, float]:  # type: ignore[override]
        """Return batches per second, and CPU milliseconds per batch."""
        for _ in range(NUM_DISCARDED):
            next(self._batches)
        before_s = self._cpu_s()
        rate, count = rate_of(self._batches, seconds, 0)
        return rate, 1e3 * (self._cpu_s() - before_s) / count

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(process_times.user + process_times.system for process_times in times)


class EpochGap:
    """Measures the milliseconds from the last batch of an epoch to the first batch of the next."""

    def __init__(self, handle: LoaderHandle) -> None:
        self._handle = handle

    def measure(self, seconds: float) -> float:
        """Return the median over all epochs that fit into the time."""
        gaps: list[float] = []
        deadline = time.perf_counter() + seconds
        last = self._run_epoch()[1]
        while time.perf_counter() < deadline or len(gaps) < _MIN_GAPS:
            first, end = self._run_epoch()
            gaps.append(first - last)
            last = end
        return statistics.median(gaps) * 1000

    def _run_epoch(self) -> tuple[float, float]:
        """Take an epoch's batches. Return the times at which the first and the last one arrived."""
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
        """Stop the workers."""
        self._handle.close()
