"""In which order an epoch visits the dataset: pure arithmetic, the same in every process.

Guarantees: an epoch's order is a permutation that is computed, never stored: memory is O(positions asked for), whatever
the dataset's size. It depends on `OrderSettings`, the dataset's length and the epoch, and on nothing else: neither the
batch size nor the number of ranks or workers, so that a run can go on with others.

    epoch, positions ──► window shuffle ──► run shuffle ──► rotation ──► dataset indices
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from swift_loader.permutation import Purpose, derive_key, permute

__all__ = ["Order", "OrderSettings", "run_length_for"]

MIXING = 0.73
"""The least share of a batch that comes from runs of its own, on average; it sets the length of the runs."""


@lru_cache
def run_length_for(window: int, batch_size: int) -> int:
    """Return how many consecutive samples stay together when shuffling within windows.

    A batch drawn from a window of `window / run` runs meets `window / run * (1 - (1 - batch / window) ** run)` of them
    on average. The longest run that keeps this above `MIXING` times the batch size reads most locally and still mixes.
    """
    longest, too_long = 1, window + 1
    while longest + 1 < too_long:  # what is met falls with the length
        run = (longest + too_long) // 2
        met = window / run * (1 - (1 - min(1.0, batch_size / window)) ** run)
        longest, too_long = (longest, run) if met < MIXING * batch_size else (run, too_long)
    return longest


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """What an order depends on, apart from the dataset's length. A saved state has all of it."""

    seed: int
    shuffle: bool
    window: int
    """Samples that are to be shuffled together; 0: all of them."""
    run_length: int
    """Consecutive samples that stay in one window."""

    @classmethod
    def of(cls, *, seed: int, shuffle: bool, window: int, batch_size: int) -> OrderSettings:
        """Return the settings of a new run; the batch size it begins with decides how long runs are."""
        return cls(seed, shuffle, window, run_length_for(window, batch_size) if window else 1)


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which an epoch visits the dataset: a permutation of `range(num_samples)`, computed on demand."""

    num_samples: int
    settings: OrderSettings

    @property
    def window(self) -> int:
        """Samples that are shuffled together: about as many as asked for, in whole runs; 0: all of them."""
        asked, run_length = self.settings.window, self.settings.run_length
        return max(1, round(asked / run_length)) * run_length if asked else 0

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
        window = self.window
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
        """Send position p to a sample: runs in permuted order, the samples left over last, cut anew each epoch."""
        length = np.uint64(self.settings.run_length)
        num_runs = self.num_samples // self.settings.run_length
        slots = positions // length
        runs = slots.copy()
        in_runs = slots < np.uint64(num_runs)  # the others are the fewer than `run_length` samples after the last run
        runs[in_runs] = self._permute_runs(epoch, slots[in_runs], num_runs)
        rotation = derive_key(self.settings.seed, Purpose.ROTATION.value, epoch) % self.num_samples
        samples: NDArray[np.uint64] = runs * length + (positions - slots * length) + np.uint64(rotation)
        samples %= np.uint64(self.num_samples)
        return samples

    def _permute_runs(self, epoch: int, slots: NDArray[np.uint64], num_runs: int) -> NDArray[np.uint64]:
        """Return which run is visited at each place; the samples of a run ask for the same place."""
        key = self._key(epoch, Purpose.RUNS)
        if not slots.size:
            return slots
        first, last = slots.min(), slots.max()
        if last - first >= slots.size:  # sparse: this rank's share of the steps of many
            return permute(slots, num_runs, key)
        runs: NDArray[np.uint64] = permute(np.arange(first, last + np.uint64(1)), num_runs, key)[slots - first]
        return runs
