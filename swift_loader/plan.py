"""Which samples form which batch: pure arithmetic, the same in every process.

Guarantees: every quantity is a function of the arguments alone; memory is O(batch) whatever the dataset's size; any
batch of any epoch can be asked for at the same cost. The worker count appears nowhere.

    epoch, step, rank ──► positions in the epoch ──► window shuffle ──► run shuffle ──► rotation ──► dataset indices
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from swift_loader.permutation import derive_key, permute

__all__ = ["BatchPlan", "Order", "Plan", "PlanReader", "PlanSettings", "Uneven", "run_length_for"]

BLOCK_POSITIONS = 8192
"""Positions a `PlanReader` permutes at once: 0.4 ms for 256 of them, 0.9 ms for 8,192; more would need over 1 MB."""

MIXING = 0.73
"""The least share of a batch that comes from runs of its own, on average; it sets the length of the runs."""


class Uneven(str, Enum):
    """What becomes of the last step when the samples left don't fill it on all ranks."""

    PAD = "pad"
    """Split evenly; samples from the epoch's start fill up the ranks that would have one less."""
    DROP = "drop"
    """Split evenly; the samples that can't be split are left out."""
    EXACT = "exact"
    """Split without padding or loss; ranks may differ by one sample, and so by one batch."""


class _Purpose(int, Enum):
    """Keeps the keys of one epoch apart."""

    WHOLE = 1
    WINDOW = 2
    RUNS = 3
    ROTATION = 4


@lru_cache
def run_length_for(window: int, batch_size: int) -> int:
    """Return how many consecutive samples stay together when shuffling within windows.

    A batch drawn from a window of `window / run` runs meets `window / run * (1 - (1 - batch / window) ** run)` of them
    on average. The longest run that keeps this above `MIXING` times the batch size reads most locally and still mixes.
    """
    if window <= batch_size:
        return 1
    run = 1
    while True:
        longer = run + 1
        met = window / longer * (1 - (1 - batch_size / window) ** longer)
        if longer > window or met < MIXING * batch_size:
            return run
        run = longer


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which an epoch visits the dataset: a permutation of `range(num_samples)`, computed on demand."""

    num_samples: int
    seed: int
    shuffle: bool
    window: int
    """Samples that are shuffled together; 0: all of them."""
    run_length: int
    """Consecutive samples that stay in one window."""

    @classmethod
    def of(cls, num_samples: int, *, seed: int, shuffle: bool, window: int, batch_size: int) -> Order:
        """Return the order for a window of about `window` samples, rounded to whole runs."""
        run_length = run_length_for(window, batch_size) if window else 1
        whole_runs = max(1, round(window / run_length)) * run_length if window else 0
        return cls(num_samples, seed, shuffle, whole_runs, run_length)

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset indices at these positions of this epoch; `(n,) -> (n,)`, each in `[0, num_samples)`."""
        if not self.shuffle or not positions.size:
            return positions
        unsigned = positions.astype(np.uint64)
        if not self.window:
            shuffled = permute(unsigned, self.num_samples, self._key(epoch, _Purpose.WHOLE))
        else:
            shuffled = self._visit_runs(epoch, self._shuffle_windows(epoch, unsigned))
        return shuffled.astype(np.int64)

    def _key(self, epoch: int, purpose: _Purpose) -> NDArray[np.uint64]:
        return np.array([derive_key(self.seed, epoch, purpose.value)], np.uint64)

    def _shuffle_windows(self, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Move each position within its window; the last window may be shorter than the others."""
        size = np.uint64(self.window)
        window_of: NDArray[np.uint64] = positions // size
        first: NDArray[np.uint64] = window_of * size
        keys: NDArray[np.uint64] = self._key(epoch, _Purpose.WINDOW) + window_of * np.uint64(0xD1B54A32D192ED03)
        num_whole, last_size = divmod(self.num_samples, self.window)
        whole = window_of < np.uint64(num_whole)
        moved: NDArray[np.uint64] = first.copy()
        if whole.all():
            moved += permute(positions - first, self.window, keys)
            return moved
        for members, window_size in ((whole, self.window), (~whole, last_size)):
            if members.any():
                moved[members] += permute(positions[members] - first[members], window_size, keys[members])
        return moved

    def _visit_runs(self, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Send position p to a sample: runs in permuted order, the samples left over last, cut anew each epoch."""
        length = np.uint64(self.run_length)
        num_runs = self.num_samples // self.run_length
        slots = positions // length
        runs = slots.copy()
        in_runs = slots < np.uint64(num_runs)  # the others are the fewer than `run_length` samples after the last run
        runs[in_runs] = self._permute_runs(epoch, slots[in_runs], num_runs)
        rotation = derive_key(self.seed, epoch, _Purpose.ROTATION.value) % self.num_samples
        samples: NDArray[np.uint64] = runs * length + (positions - slots * length) + np.uint64(rotation)
        samples %= np.uint64(self.num_samples)
        return samples

    def _permute_runs(self, epoch: int, slots: NDArray[np.uint64], num_runs: int) -> NDArray[np.uint64]:
        """Return which run is visited at each place; the samples of a run ask for the same place."""
        key = self._key(epoch, _Purpose.RUNS)
        if not slots.size:
            return slots
        first, last = slots.min(), slots.max()
        if last - first >= slots.size:  # sparse: this rank's share of the steps of many
            return permute(slots, num_runs, key)
        runs: NDArray[np.uint64] = permute(np.arange(first, last + np.uint64(1)), num_runs, key)[slots - first]
        return runs


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """All that a plan depends on, apart from the dataset's length."""

    batch_size: int
    world_size: int
    rank: int
    seed: int
    shuffle: bool
    window: int
    uneven: Uneven
    drop_last: bool


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch of one rank."""

    indices: NDArray[np.int64]
    """`(n,)` dataset indices, in the order of the samples."""
    num_padding: int
    """How many samples at the end repeat the epoch's first ones so that all ranks have equally many."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An epoch of one rank, cut into batches.

    Global step s uses positions `[s*B*R, (s+1)*B*R)` for batch size B and R ranks, and rank r the r-th B of them: after
    any step the samples used by all ranks are a prefix of the order.
    """

    order: Order
    batch_size: int
    world_size: int
    rank: int
    uneven: Uneven
    drop_last: bool

    @classmethod
    def of(cls, num_samples: int, settings: PlanSettings) -> Plan:
        """Return the plan for a dataset of this length."""
        order = Order.of(
            num_samples,
            seed=settings.seed,
            shuffle=settings.shuffle,
            window=settings.window,
            batch_size=settings.batch_size,
        )
        uneven, drop_last = settings.uneven, settings.drop_last
        return cls(order, settings.batch_size, settings.world_size, settings.rank, uneven, drop_last)

    @property
    def num_batches(self) -> int:
        """Batches per epoch on this rank."""
        return self._num_full_steps + (self._last_count(self.rank) > 0)

    def batch(self, epoch: int, step: int) -> BatchPlan:
        """Return batch `step` of `epoch`.

        Raises:
            IndexError: `step` is not in `[0, num_batches)`.
        """
        return self.batches(epoch, step, step + 1)[0]

    def batches(self, epoch: int, first_step: int, stop_step: int) -> list[BatchPlan]:
        """Return the batches of several steps; far cheaper than one by one.

        Raises:
            IndexError: the steps are not within `[0, num_batches)`.
        """
        if not 0 <= first_step < stop_step <= self.num_batches:
            raise IndexError(f"steps [{first_step}, {stop_step}) are outside an epoch of {self.num_batches} batches")
        extents = [self._extent(step) for step in range(first_step, stop_step)]
        num_samples = self.order.num_samples
        positions = np.concatenate([np.arange(start, start + count, dtype=np.int64) for start, count in extents])
        indices = self.order.indices(epoch, positions % num_samples)
        batches, taken = [], 0
        for step, (_, count) in zip(range(first_step, stop_step), extents, strict=True):
            batches.append(BatchPlan(indices[taken : taken + count], self.num_padding(step)))
            taken += count
        return batches

    def num_padding(self, step: int) -> int:
        """Return how many samples at the end of a batch are repeats."""
        start, count = self._extent(step)
        return max(0, min(count, start + count - self.order.num_samples))

    @property
    def _num_full_steps(self) -> int:
        return self.order.num_samples // (self.batch_size * self.world_size)

    def _extent(self, step: int) -> tuple[int, int]:
        """Return the first position and the number of samples of this rank's share of a step."""
        base = step * self.batch_size * self.world_size
        if step < self._num_full_steps:
            return base + self.rank * self.batch_size, self.batch_size
        before = sum(self._last_count(rank) for rank in range(self.rank))
        return base + before, self._last_count(self.rank)

    def _last_count(self, rank: int) -> int:
        """Return how many samples a rank gets in the last, partial step; 0 when there is no such step for it."""
        left = self.order.num_samples - self._num_full_steps * self.batch_size * self.world_size
        if self.drop_last or not left:
            return 0
        if self.uneven is Uneven.PAD:
            return -(-left // self.world_size)
        share, rest = divmod(left, self.world_size)
        return share + (self.uneven is Uneven.EXACT and rank < rest)


class PlanReader:
    """Reads a plan step by step, computing a block of neighbouring steps at a time; O(block) memory."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._steps_per_block = max(1, BLOCK_POSITIONS // plan.batch_size)
        self._block_key = (-1, -1)
        self._block: list[BatchPlan] = []

    def batch(self, epoch: int, step: int) -> BatchPlan:
        """Return what `plan.batch(epoch, step)` returns."""
        block_index, offset = divmod(step, self._steps_per_block)
        if self._block_key != (epoch, block_index):
            first = step - offset
            self._block = self.plan.batches(epoch, first, min(first + self._steps_per_block, self.plan.num_batches))
            self._block_key = (epoch, block_index)
        return self._block[offset]
