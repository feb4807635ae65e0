"""The order in which an epoch visits the dataset: pure arithmetic, the same in every process.

Guarantees: an epoch's order is a permutation that is computed, never stored. Memory is O(requested positions),
independent of the dataset's size. The order depends on `OrderSettings`, the dataset's length and the epoch, and on
nothing else. So a run can resume with another batch size, number of ranks or number of workers.

    epoch, positions ──► window shuffle ──► run shuffle ──► rotation ──► dataset indices
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.permutation import Purpose, derive_key, permute

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

MAX_SAMPLES = 2**63 - 1
"""No dataset has more. Larger windows, runs and batches have the same effect as this value."""


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


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """Everything that an order depends on, except the dataset's length and the epoch. A saved state has all of it."""

    seed: int
    shuffle: bool
    window: int
    """Number of samples to shuffle together; 0: all of them."""
    run_length: int
    """Number of consecutive samples that stay in one window."""

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

    @property
    def window(self) -> int:
        """Number of samples that are shuffled together: the setting, rounded to whole runs; 0: all of them."""
        num_runs, rest = divmod(self.settings.window, self.settings.run_length)
        if 2 * rest > self.settings.run_length - num_runs % 2:  # a half rounds to the even number
            num_runs += 1
        return max(1, num_runs) * self.settings.run_length if self.settings.window else 0

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset indices at these positions of this epoch; `(n,) -> (n,)`, each in `[0, num_samples)`."""
        if not self.settings.shuffle or not positions.size:
            return positions
        unsigned = positions.astype(np.uint64)
        if not self.window:
            shuffled = permute(unsigned, self.num_samples, self._key(epoch, Purpose.WHOLE))
        else:
            shuffled = self._visit_runs(epoch, self._shuffle_windows(epoch, unsigned))
        return shuffled.astype(np.int64)

    def _key(self, epoch: int, purpose: Purpose) -> NDArray[np.uint64]:
        return np.array([derive_key(self.settings.seed, purpose.value, epoch)], np.uint64)

    def _shuffle_windows(self, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Move each position within its window; the last window may be shorter than the others."""
        window = min(self.window, self.num_samples)  # a larger one has the same effect, and may not fit into 64 bits
        size = np.uint64(window)
        window_of: NDArray[np.uint64] = positions // size
        first: NDArray[np.uint64] = window_of * size
        keys: NDArray[np.uint64] = self._key(epoch, Purpose.WINDOW) + window_of * np.uint64(0xD1B54A32D192ED03)
        num_whole, last_size = divmod(self.num_samples, window)
        whole = window_of < np.uint64(num_whole)
        moved: NDArray[np.uint64] = first.copy()
        if whole.all():
            moved += permute(positions - first, window, keys)
            return moved
        for members, window_size in ((whole, window), (~whole, last_size)):
            if members.any():
                moved[members] += permute(positions[members] - first[members], window_size, keys[members])
        return moved

    def _visit_runs(self, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Map positions to samples: runs in permuted order, then the remaining samples. The cuts change each epoch."""
        run_length = min(self.settings.run_length, self.num_samples + 1)  # no run is longer than the dataset
        length = np.uint64(run_length)
        num_runs = self.num_samples // run_length
        slots = positions // length
        runs = slots.copy()
        in_runs = slots < np.uint64(num_runs)  # the others are the remaining samples, fewer than `run_length`
        runs[in_runs] = self._permute_runs(epoch, slots[in_runs], num_runs)
        rotation = derive_key(self.settings.seed, Purpose.ROTATION.value, epoch) % self.num_samples
        samples: NDArray[np.uint64] = runs * length + (positions - slots * length) + np.uint64(rotation)
        samples %= np.uint64(self.num_samples)
        return samples

    def _permute_runs(self, epoch: int, slots: NDArray[np.uint64], num_runs: int) -> NDArray[np.uint64]:
        """Return the run that is visited in each slot. All samples of a run have the same slot."""
        key = self._key(epoch, Purpose.RUNS)
        if not slots.size:
            return slots
        first, last = slots.min(), slots.max()
        if last - first >= slots.size:  # sparse: this rank's share, one of many
            return permute(slots, num_runs, key)
        runs: NDArray[np.uint64] = permute(np.arange(first, last + np.uint64(1)), num_runs, key)[slots - first]
        return runs
