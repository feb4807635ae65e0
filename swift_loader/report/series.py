"""What the loop and the workers did over time, in equal bins. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations, are_of_one_pass

__all__ = ["MAX_ROWS", "Series"]

Floats = NDArray[np.float64]

MAX_ROWS = 64
"""With more workers, each row stands for several of them."""

_MAX_BINS = 120
_BATCHES_PER_BIN = 4


@dataclass(frozen=True, slots=True)
class Series:
    """What happened in each of n bins of time. There is at least one batch."""

    edges_s: Floats
    """Their edges, `(n + 1,)`, in seconds since the loop asked for the first batch."""
    batches_per_s: Floats
    """`(n,)`."""
    wait_share: Floats
    """Share of the bin in which the loop waited, `(n,)`, from 0 to 1."""
    epochs: tuple[tuple[int, float], ...]
    """Each epoch but the first, and when the loop asked for its first batch."""
    occupancy: Floats
    """`(rows, n)`: share of the bin in which a worker was at a batch, from 0 to 1. NaN after the last batch was built:
    others may have been built since that the loop hasn't got."""
    workers_per_row: int

    @classmethod
    def of(cls, observations: Observations) -> Series:
        """Return the series of the batches in the observations."""
        batches = observations.batches
        zero = int(batches["asked_ns"][0])
        asked, delivered = (batches["asked_ns"] - zero) * 1e-9, (batches["delivered_ns"] - zero) * 1e-9
        delivered = np.maximum.accumulate(delivered)
        num_bins = int(np.clip(len(batches) // _BATCHES_PER_BIN, 1, _MAX_BINS))
        edges = np.linspace(0, max(float(delivered[-1]), 1e-9), num_bins + 1)
        width = edges[1]
        begins = np.flatnonzero(~are_of_one_pass(batches)) + 1
        occupancy, workers_per_row = _occupancy(observations, zero, edges)
        return cls(
            edges_s=edges,
            batches_per_s=_counted(delivered, edges) / width,
            wait_share=_covered(asked, delivered, edges) / width,
            epochs=tuple((int(batches["epoch"][place]), float(asked[place])) for place in begins),
            occupancy=occupancy,
            workers_per_row=workers_per_row,
        )


def _counted(times: Floats, edges: Floats) -> Floats:
    """Return how many of these ascending times lie in each bin."""
    counts: Floats = np.diff(np.searchsorted(times, edges[1:-1], side="right"), prepend=0, append=len(times))
    return counts.astype(np.float64)


def _covered(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """Return how much of each bin is covered by these intervals, which follow one another."""
    ends = np.maximum(begins, ends)
    begins = np.maximum(begins, np.concatenate([begins[:1], np.maximum.accumulate(ends)[:-1]]))
    ends = np.maximum(begins, ends)
    times = np.column_stack([begins, ends]).ravel()
    sums = np.repeat(np.concatenate([[0.0], np.cumsum(ends - begins)]), 2)[1:-1]
    covered: Floats = np.diff(np.interp(edges, times, sums))
    return covered


def _occupancy(observations: Observations, zero: int, edges: Floats) -> tuple[Floats, int]:
    batches = observations.batches[observations.batches["began_ns"] > 0]
    last = int(batches["worker_id"].max()) if len(batches) else 0
    num_workers = max(1, observations.setup.num_workers, last + 1)
    workers_per_row = -(-num_workers // MAX_ROWS)
    occupancy = np.zeros((-(-num_workers // workers_per_row), len(edges) - 1))
    end = 0.0
    for worker in range(num_workers):
        own = np.sort(batches[batches["worker_id"] == worker], order="began_ns")
        if not len(own):
            continue
        began = (own["began_ns"] - zero) * 1e-9
        ended = began + (own["fetch_ns"] + own["collate_ns"] + own["encode_ns"]) * 1e-9
        occupancy[worker // workers_per_row] += _covered(began, ended, edges)
        end = max(end, float(ended[-1]))
    sizes = np.minimum(workers_per_row, num_workers - workers_per_row * np.arange(len(occupancy)))
    occupancy[:, edges[:-1] >= end] = np.nan
    return np.clip(occupancy / (edges[1] * sizes[:, None]), 0, 1), workers_per_row
