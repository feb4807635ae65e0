"""Measures how long each stage of a batch takes: counts, means and quantiles, in O(1) memory.

The loop's thread and the receivers report to it. This costs less than a microsecond per batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.process_owner import ProcessOwner
from swift_loader.transport.messages import Batch

__all__ = ["Histogram", "Metrics"]

_SUBDIVISIONS = 4
"""Buckets per power of two. Quantiles are accurate to 20 %."""

_NUM_BUCKETS = 64 * _SUBDIVISIONS

_NS_PER_MS = 1e6

_MAX_PUT_ASIDE = 1024


@dataclass(slots=True)
class Histogram:
    """A histogram of durations in nanoseconds. Its buckets grow with the duration."""

    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    _buckets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_NUM_BUCKETS, np.int64))

    def note_all(self, durations_ns: NDArray[np.int64]) -> None:
        """Count `(n,)` durations. Far cheaper than counting them one by one."""
        if not durations_ns.size:
            return
        self.count += durations_ns.size
        self.total_ns += sum(durations_ns.tolist())
        self.max_ns = max(self.max_ns, int(durations_ns.max()))
        self._buckets += np.bincount(_buckets_of(durations_ns), minlength=_NUM_BUCKETS)

    def quantile_ns(self, share: float) -> float:
        """Return the quantile of the durations at `share`, from 0 to 1. Return 0 if there are none."""
        wanted, seen = share * self.count, 0
        for bucket, number in enumerate(self._buckets.tolist()):
            seen += number
            if number and seen >= wanted:
                return min(_upper_edge_ns(bucket), self.max_ns)
        return 0.0

    def summary(self) -> dict[str, float]:
        """Return mean, p50, p99 and max in milliseconds, and the total in seconds."""
        return {
            "mean_ms": self.total_ns / max(1, self.count) / _NS_PER_MS,
            "p50_ms": self.quantile_ns(0.5) / _NS_PER_MS,
            "p99_ms": self.quantile_ns(0.99) / _NS_PER_MS,
            "max_ms": self.max_ns / _NS_PER_MS,
            "total_s": self.total_ns / 1e9,
        }


def _buckets_of(durations_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    durations_ns = np.maximum(durations_ns, 0)
    exponents = np.frexp(durations_ns.astype(np.float64))[1].astype(np.int64) - 1
    exponents -= durations_ns < np.left_shift(1, np.maximum(exponents, 0))  # rounded up to the next power of two
    parts = np.right_shift(durations_ns, np.maximum(exponents - 2, 0)) % _SUBDIVISIONS
    buckets = np.where(durations_ns < _SUBDIVISIONS, durations_ns, (exponents - 1) * _SUBDIVISIONS + parts)
    return np.minimum(buckets, _NUM_BUCKETS - 1)


def _upper_edge_ns(bucket: int) -> float:
    if bucket < _SUBDIVISIONS:
        return float(bucket)
    exponent, part = divmod(bucket, _SUBDIVISIONS)
    return 2.0 ** (exponent + 1) * (1 + (part + 1) / _SUBDIVISIONS)


class Metrics:
    """The times of all batches of a loader. Thread-safe."""

    STAGES = ("fetch", "collate", "encode", "decode", "wait")
    """In the worker: fetch the samples, collate them, copy what isn't in the slot yet. In the trainer: make views of
    the slot; wait for the batch."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.RLock()
        self._process = ProcessOwner()
        self._stages = {name: Histogram() for name in self.STAGES}
        self._num_samples = 0
        self._num_ready = 0
        self._num_restarts = 0
        # Counting one by one would cost 3 % of a small batch. So figures are collected here and counted many at a time.
        self._arrivals: list[tuple[int, int, int, int, int]] = []
        self._waits: list[tuple[int, int]] = []

    def note_batch(self, batch: Batch, decode_ns: int) -> None:
        """Count a batch that arrived in the trainer."""
        if not self._enabled:
            return
        with self._lock:
            self._arrivals.append((batch.fetch_ns, batch.collate_ns, batch.encode_ns, decode_ns, batch.num_samples))
            if len(self._arrivals) >= _MAX_PUT_ASIDE:
                self._count()

    def note_wait(self, wait_ns: int, num_ready: int) -> None:
        """Count a batch that the loop got: how long the loop waited, and how many batches were ready."""
        if not self._enabled:
            return
        with self._lock:
            self._waits.append((wait_ns, num_ready))
            if len(self._waits) >= _MAX_PUT_ASIDE:
                self._count()

    def note_restart(self) -> None:
        """Count a process that was replaced."""
        with self._lock:
            self._num_restarts += 1

    def _count(self) -> None:
        """Count the collected figures. The caller holds the lock."""
        if self._arrivals:
            *columns, samples = np.array(self._arrivals).T
            for name, column in zip(self.STAGES, columns, strict=False):
                self._stages[name].note_all(column)
            self._num_samples += int(samples.sum())
        if self._waits:
            durations, ready = np.array(self._waits).T
            self._stages["wait"].note_all(durations)
            self._num_ready += int(ready.sum())
        self._arrivals.clear()
        self._waits.clear()

    def report(self) -> dict[str, Any]:
        """Return all figures, as plain JSON types. Return an empty dict if measuring is off."""
        if not self._enabled:
            return {}
        if not self._process.is_here():  # a fork: the thread that may hold the lock doesn't exist here
            self._lock, self._process = threading.RLock(), ProcessOwner()
        with self._lock:
            self._count()
            num_delivered = self._stages["wait"].count
            return {
                "batches_built": self._stages["fetch"].count,
                "batches_delivered": num_delivered,
                "samples_built": self._num_samples,
                "worker_restarts": self._num_restarts,
                "mean_batches_ready": self._num_ready / max(1, num_delivered),
                "stages": {name: histogram.summary() for name, histogram in self._stages.items()},
            }
