"""The order in which an epoch visits the dataset: pure arithmetic, the same in every process.

Guarantees: an epoch's order is a permutation that is computed, never stored. Memory is O(requested positions),
independent of the dataset's size. The order depends on `OrderSettings`, the dataset's length and the epoch, and on
nothing else. So a run can resume with another batch size, number of ranks or number of workers.

    epoch, positions ──► window shuffle ──► run shuffle ──► rotation ──► dataset indices
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.integers import ANY_COUNT, MAX_BITS, Form, in_state, integer
from swift_loader.sampling.permutation import Positions, Purpose, derive_key, permute

if TYPE_CHECKING:
    from swift_loader.sampling.mixture import Mix

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


def _read_mix(state: Any) -> Mix:
    from swift_loader.sampling.mixture import Mix

    return Mix.of_state(state)


def _write_mix(mix: Mix | None) -> Any:
    return MISSING if mix is None else dict(mix.state)


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """Everything that an order depends on, except the dataset's length and the epoch. A saved state has all of it."""

    seed: int = in_state(ANY_COUNT)
    shuffle: bool = in_state(ANY_COUNT._replace(read=lambda value: bool(ANY_COUNT.read(value)), write=int))
    window: int = in_state(ANY_COUNT, "nearby_shuffle")
    """Number of samples to shuffle together; 0: all of them."""
    run_length: int = in_state(integer(1, 2**MAX_BITS - 1))
    """Number of consecutive samples that stay in one window."""
    mix: Mix | None = in_state(Form("what a mixture saves", _read_mix, _write_mix), "mixture", older=None)
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

    @property
    def rounded_window(self) -> int:
        """The window, rounded to whole runs; 0: all samples."""
        num_runs, rest = divmod(self.window, self.run_length)
        if 2 * rest > self.run_length - num_runs % 2:  # a half rounds to the even number
            num_runs += 1
        return max(1, num_runs) * self.run_length if self.window else 0


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


_Key = Callable[[Purpose], NDArray[np.uint64]]
"""Returns keys for a purpose: `(1,)`, or `(n,)` with one for each position."""


def visit(settings: OrderSettings, positions: Positions, sizes: Any, key: _Key, *, inverse: bool = False) -> Positions:
    """Return the samples at these positions of epochs, `(n,) -> (n,)`; with `inverse`, the other way round.

    `sizes`: the length of the dataset, or `(n,)`: positions may be in datasets of different lengths, with their keys.
    """
    if not settings.shuffle or not positions.size:
        return positions
    if not settings.window:
        return permute(positions, sizes, key(Purpose.WHOLE), inverse=inverse)
    lengths = np.minimum(np.uint64(min(settings.run_length, MAX_SAMPLES)), sizes + np.uint64(1))
    if inverse:
        return _in_windows(settings, _in_runs(positions, sizes, lengths, key, inverse), sizes, key, inverse)
    return _in_runs(_in_windows(settings, positions, sizes, key, inverse), sizes, lengths, key, inverse)


def _in_windows(settings: OrderSettings, positions: Positions, sizes: Any, key: _Key, inverse: bool) -> Positions:
    """Move each position within its window; the last window may be shorter than the others."""
    window = np.minimum(np.uint64(min(settings.rounded_window, MAX_SAMPLES)), sizes)
    window_of = positions // window
    first: Positions = window_of * window
    keys = key(Purpose.WINDOW) + window_of * np.uint64(0xD1B54A32D192ED03)
    moved: Positions = first + permute(positions - first, np.minimum(window, sizes - first), keys, inverse=inverse)
    return moved


def _in_runs(positions: Positions, sizes: Any, lengths: Any, key: _Key, inverse: bool) -> Positions:
    """Map positions to samples: runs in permuted order, then the remaining samples. The cuts change each epoch."""
    num_runs, rotation = sizes // lengths, key(Purpose.ROTATION) % sizes
    if inverse:
        positions = (positions + (sizes - rotation)) % sizes
    slots = positions // lengths
    runs = slots.copy()
    in_runs = slots < num_runs  # the others are the remaining samples, fewer than a run
    keys, counts = key(Purpose.RUNS), num_runs if num_runs.ndim == 0 else num_runs[in_runs]
    runs[in_runs] = _permuted_runs(slots[in_runs], counts, keys if keys.size == 1 else keys[in_runs], inverse)
    samples: Positions = runs * lengths + (positions - slots * lengths)
    return samples if inverse else (samples + rotation) % sizes


def _permuted_runs(slots: Positions, counts: Any, keys: Positions, inverse: bool) -> Positions:
    """Return the run that is visited in each slot. All samples of a run have the same slot."""
    if not slots.size:
        return slots
    first, last = slots.min(), slots.max()
    if counts.ndim or last - first >= slots.size:  # sparse: this rank's share, one of many
        return permute(slots, counts, keys, inverse=inverse)
    dense = np.arange(first, last + np.uint64(1))
    runs: Positions = permute(dense, counts, keys, inverse=inverse)[slots - first]
    return runs
