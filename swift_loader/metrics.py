"""How long each stage of a batch takes: counts, means and quantiles in constant memory.

Fed by the loop's thread and the receivers; costs a few microseconds a batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from swift_loader.transport.messages import Batch

__all__ = ["Histogram", "Metrics"]

_SUBDIVISIONS = 4
"""Buckets per power of two: a quantile is right to within a fifth."""

_NUM_BUCKETS = 64 * _SUBDIVISIONS

_NS_PER_MS = 1e6


@dataclass(slots=True)
class Histogram:
    """Durations in nanoseconds, in buckets that grow with the duration."""

    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    _buckets: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)

    def note(self, duration_ns: int) -> None:
        """Count one duration."""
        self.count += 1
        self.total_ns += duration_ns
        self.max_ns = max(self.max_ns, duration_ns)
        self._buckets[_bucket_of(duration_ns)] += 1

    def quantile_ns(self, share: float) -> float:
        """Return a duration that about this share of the durations doesn't exceed; 0 if there are none."""
        wanted, seen = share * self.count, 0
        for bucket, number in enumerate(self._buckets):
            seen += number
            if number and seen >= wanted:
                return min(_upper_edge_ns(bucket), self.max_ns)
        return 0.0

    def summary(self) -> dict[str, float]:
        """Return the figures in milliseconds: mean, p50, p99, max; and the total in seconds."""
        return {
            "mean_ms": self.total_ns / max(1, self.count) / _NS_PER_MS,
            "p50_ms": self.quantile_ns(0.5) / _NS_PER_MS,
            "p99_ms": self.quantile_ns(0.99) / _NS_PER_MS,
            "max_ms": self.max_ns / _NS_PER_MS,
            "total_s": self.total_ns / 1e9,
        }


def _bucket_of(duration_ns: int) -> int:
    if duration_ns < _SUBDIVISIONS:
        return max(0, duration_ns)
    exponent = duration_ns.bit_length() - 1
    return min(_NUM_BUCKETS - 1, (exponent - 1) * _SUBDIVISIONS + (duration_ns >> exponent - 2) % _SUBDIVISIONS)


def _upper_edge_ns(bucket: int) -> float:
    if bucket < _SUBDIVISIONS:
        return float(bucket)
    exponent, part = divmod(bucket, _SUBDIVISIONS)
    return 2.0 ** (exponent + 1) * (1 + (part + 1) / _SUBDIVISIONS)


class Metrics:
    """The stages of all batches of a loader. Thread-safe."""

    STAGES = ("fetch", "collate", "encode", "decode", "wait")
    """In the worker: the samples; the batch; what of it is copied. In the trainer: views of it; the loop's waiting."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._stages = {name: Histogram() for name in self.STAGES}
        self._num_samples = 0
        self._num_ready = 0

    def note_batch(self, batch: Batch, decode_ns: int) -> None:
        """Count a batch that has arrived."""
        if not self._enabled:
            return
        with self._lock:
            self._stages["fetch"].note(batch.fetch_ns)
            self._stages["collate"].note(batch.collate_ns)
            self._stages["encode"].note(batch.encode_ns)
            self._stages["decode"].note(decode_ns)
            self._num_samples += batch.num_samples

    def note_wait(self, wait_ns: int, num_ready: int) -> None:
        """Count a batch that was handed to the loop, which waited for it while so many others were ready."""
        if not self._enabled:
            return
        with self._lock:
            self._stages["wait"].note(wait_ns)
            self._num_ready += num_ready

    def report(self) -> dict[str, Any]:
        """Return all figures, as plain JSON types; empty if they aren't being taken."""
        if not self._enabled:
            return {}
        with self._lock:
            num_delivered = self._stages["wait"].count
            return {
                "batches_built": self._stages["fetch"].count,
                "batches_delivered": num_delivered,
                "samples_built": self._num_samples,
                "mean_batches_ready": self._num_ready / max(1, num_delivered),
                "stages": {name: histogram.summary() for name, histogram in self._stages.items()},
            }
