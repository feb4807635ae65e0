"""A histogram of durations, in O(1) memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Histogram"]

_SUBDIVISIONS = 4
"""Buckets per power of two. Quantiles are accurate to 20 %."""

_NUM_BUCKETS = 64 * _SUBDIVISIONS

_NS_PER_MS = 1e6


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
