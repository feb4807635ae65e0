"""The order in which an epoch visits the dataset: pure arithmetic, the same in every process.

Guarantees: an epoch's order is a permutation that is computed, never stored. Memory is O(requested positions),
independent of the dataset's size. The order depends on `OrderSettings`, the dataset's length and the epoch, and on
nothing else. So a run can resume with another batch size, number of ranks or number of workers.

    epoch, positions ──► window shuffle ──► run shuffle ──► rotation ──► dataset indices
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.integers import Form, in_state
from swift_loader.sampling.mixture import Mix
from swift_loader.sampling.permutation import MAX_SAMPLES, Purpose, Shuffle, derive_key, visit

MIXING = 0.73
"""Minimum ratio of distinct runs in a batch to samples in it, on average. It determines the length of the runs if the
user has chosen the window."""

RUN_LENGTH = 8
"""Length of the runs if the user hasn't chosen the window, in samples. With 8, small records are read six to seven
times as fast from a disk, and twice as fast from a cold file on an SSD. With 16, records of 3 KB are slower on the
SSD."""

MAX_RUN_MATES = 0.02
"""How many other samples of its run a sample meets in its batch, on average, if the user hasn't chosen the window. In
a batch of class-sorted data, the variance of the class counts exceeds that of a uniform shuffle by the same share, and
by twice as much if the last window of an epoch is very short."""

MIN_BATCH_SIZE = 32
"""Smaller batches get the window of this batch size, because their gradients are usually accumulated."""


def local_window(batch_size: int, run_length: int = RUN_LENGTH) -> int:
    """Return the smallest window in which a sample meets `MAX_RUN_MATES` others of its run for runs of this length, in
    samples.
    """
    # Of the `run_length - 1` other samples of a run, the share `batch_size / window` is in the batch.
    return round((run_length - 1) / MAX_RUN_MATES) * max(batch_size, MIN_BATCH_SIZE)


@lru_cache
def run_length_for(window: int, batch_size: int) -> int:
    """Return how many consecutive samples stay together when shuffling within windows.

    A batch from a window of `window / run` runs has samples of `window / run * (1 - (1 - batch / window) ** run)` runs
    on average. The longest run that keeps this above `MIXING` times the batch size has the most local reads and still
    mixes.
    """
    window, batch_size = min(window, MAX_SAMPLES), min(batch_size, MAX_SAMPLES)
    longest, too_long = 1, window + 1
    while longest + 1 < too_long:  # bisection: the number of runs in a batch decreases with their length
        run = (longest + too_long) // 2
        met = window / run * (1 - (1 - min(1.0, batch_size / window)) ** run)
        longest, too_long = (longest, run) if met < MIXING * batch_size else (run, too_long)
    return longest


def _write_mix(mix: Mix | None) -> Any:
    return MISSING if mix is None else dict(mix.state)


@dataclass(frozen=True, slots=True)
class OrderSettings(Shuffle):
    """Everything that an order depends on, except the dataset's length and the epoch."""

    mix: Mix | None = in_state(Form("what a mixture saves", Mix.of_state, _write_mix), "mixture", older=None)
    """Of a mixture, of which each source is visited in this order."""

    @classmethod
    def of(cls, *, seed: int, shuffle: bool, window: int | None, batch_size: int) -> OrderSettings:
        """Return the settings of a new run. `batch_size`: at its start.

        `window`: samples to shuffle together; 0: all of them. The runs are as long as the batch size allows. None:
        short runs, and a window so large that batches are mixed like those of a uniform shuffle.
        """
        if window is None:
            return cls(seed, shuffle, local_window(batch_size), RUN_LENGTH)
        return cls(seed, shuffle, window, run_length_for(window, batch_size) if window else 1)


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which an epoch visits the dataset: a permutation of `range(num_samples)`, computed on demand."""

    num_samples: int
    settings: OrderSettings

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset indices at these positions of this epoch; `(n,) -> (n,)`, each in `[0, num_samples)`."""
        return self._moved(epoch, positions, inverse=False)

    def positions(self, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of this epoch at which these dataset indices are: the inverse of `indices`."""
        return self._moved(epoch, indices, inverse=True)

    def _moved(self, epoch: int, positions: NDArray[np.int64], *, inverse: bool) -> NDArray[np.int64]:
        if self.settings.mix is not None:
            assert not inverse, "a mixture excludes rows itself"
            return self.settings.mix.indices(self.settings, epoch, positions)

        def key(purpose: Purpose) -> NDArray[np.uint64]:
            return np.array([derive_key(self.settings.seed, purpose.value, epoch)], np.uint64)

        size = np.uint64(self.num_samples)
        return visit(self.settings, positions.astype(np.uint64), size, key, inverse=inverse).astype(np.int64)
