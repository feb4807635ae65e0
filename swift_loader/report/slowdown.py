"""How much batches that run at the same time slow each other down, beyond sharing the cores. Pure.

Work that is bound by memory needs more CPU time when others use the memory, too. The batches tell it, because now more
of them run at the same time and now fewer: the slope of CPU time over the number that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swift_loader.report.life import Seconds

__all__ = ["Slowdown"]

_MIN_BATCHES = 30
_MIN_SPREAD = 0.1
"""Standard deviation of the number of neighbours. With less, the batches tell nothing."""

_MAX_ERROR = 0.1
"""Of the slope. With more, it isn't known."""

_MIN_SLOPE = 0.02
"""A smaller effect isn't told from noise."""

_MIN_SIGMAS = 3.0
_MAX_SLOPE = 1.0
"""Two batches at once take no longer than one after the other."""

_TAIL = 0.02
"""This share of the cheapest batches, and of the most expensive ones, says nothing about neighbours."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much batches slow each other down."""

    per_neighbour: float
    """By how much the CPU time of a batch grows with each other one that runs at the same time. From 0 to 1."""
    is_known: bool
    """Whether the batches tell it. They don't if always the same number ran at once."""

    @classmethod
    def of(cls, cpu_per_sample: Seconds, num_running: Seconds, cores: float) -> Slowdown:
        """Return the slope of the CPU time, by least squares.

        Args:
            cpu_per_sample: CPU time of each batch.
            num_running: How many batches ran on average while it did, itself included.
            cores: More can't run at a time.
        """
        beside = neighbours(num_running, cores)
        if len(beside) < _MIN_BATCHES or beside.std() < _MIN_SPREAD or cpu_per_sample.sum() <= 0:
            return cls(0.0, is_known=False)
        low, high = np.quantile(cpu_per_sample, [_TAIL, 1 - _TAIL])
        kept = (cpu_per_sample >= low) & (cpu_per_sample <= high)
        slope, error = _line(beside[kept], cpu_per_sample[kept])
        is_known = error < _MAX_ERROR
        if not is_known or slope < max(_MIN_SIGMAS * error, _MIN_SLOPE):
            return cls(0.0, is_known)
        return cls(min(_MAX_SLOPE, slope), is_known)

    def factor(self, num_running: Seconds, cores: float) -> Seconds:
        """Return by how much each batch was slowed down."""
        return 1 + self.per_neighbour * neighbours(num_running, cores)


def neighbours(num_running: Seconds, cores: float) -> Seconds:
    """Return how many others ran on a core beside each batch."""
    others: Seconds = np.clip(np.minimum(num_running, cores) - 1, 0, None)
    return others


def _line(x: Seconds, y: Seconds) -> tuple[float, float]:
    """Return the slope of a line through the points and its standard error, both divided by the line at 0."""
    deviation = x - x.mean()
    spread = float((deviation**2).sum())
    if spread <= 0:
        return 0.0, float("inf")
    slope = float((deviation * (y - y.mean())).sum()) / spread
    base = float(y.mean()) - slope * float(x.mean())
    if base <= 0:
        return 0.0, float("inf")
    error = float(np.std(y - base - slope * x)) / spread**0.5
    return slope / base, error / base
