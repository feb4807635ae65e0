"""Which samples form which batch: pure arithmetic, the same in every process.

Guarantees: every quantity is a function of the arguments alone; memory is O(batch) whatever the dataset's size; any
batch of any epoch can be asked for at the same cost. The worker count appears nowhere.

    epoch, step, rank ──► positions in the epoch ──► order ──► dataset indices
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from swift_loader.order import Order, OrderSettings

__all__ = ["MAX_EPOCH", "BatchPlan", "Plan", "PlanReader", "PlanSettings", "Position", "Shift", "Uneven"]

MAX_EPOCH = 2**62 - 1
"""What the messages to the workers have room for."""

BLOCK_POSITIONS = 8192
"""Positions a `PlanReader` permutes at once: 0.4 ms for 256 of them, 0.9 ms for 8,192; more would need over 1 MB."""


class Uneven(str, Enum):
    """What becomes of the last step when the samples left don't fill it on all ranks."""

    PAD = "pad"
    """Split evenly; samples from the epoch's start fill up the ranks that would have one less."""
    DROP = "drop"
    """Split evenly; the samples that can't be split are left out."""
    EXACT = "exact"
    """Split without padding or loss; ranks may differ by one sample, and so by one batch."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place between two samples of a run: the same for all ranks, whatever their number and their batch size."""

    epoch: int
    num_samples: int
    """Samples of the epoch's order that lie before it."""


@dataclass(frozen=True, slots=True)
class Shift:
    """In one epoch, the steps begin after so many samples: it was begun with other batches than it is finished with."""

    epoch: int
    num_samples: int
    """Less than a step has."""


NO_SHIFT = Shift(0, 0)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """All that a plan depends on, apart from the dataset's length."""

    order: OrderSettings
    batch_size: int
    world_size: int
    rank: int
    uneven: Uneven
    drop_last: bool
    shift: Shift = NO_SHIFT

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step, over all ranks."""
        return self.batch_size * self.world_size

    def going_on_at(self, position: Position) -> tuple[PlanSettings, int]:
        """Return settings with which a step begins at this position, and the number of that step.

        The shift of an epoch that is over is kept, so that what was planned beyond that epoch's end stays valid.
        """
        step, rest = divmod(position.num_samples, self.samples_per_step)
        if not rest and position.epoch > self.shift.epoch:
            return self, step
        return replace(self, shift=Shift(position.epoch, rest) if rest else NO_SHIFT), step


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch of one rank."""

    indices: NDArray[np.int64]
    """`(n,)` dataset indices, in the order of the samples."""
    num_padding: int
    """How many samples at the end repeat the epoch's first ones so that all ranks have equally many."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The epochs of one rank, cut into batches.

    Global step s uses positions `[s*B*R, (s+1)*B*R)` for batch size B and R ranks, and rank r the r-th B of them: after
    any step the samples used by all ranks are a prefix of the order, and any other B and R can go on from there. In the
    epoch that is so taken over, all steps are shifted by what the prefix has beyond a multiple of B*R.
    """

    order: Order
    settings: PlanSettings

    @classmethod
    def of(cls, num_samples: int, settings: PlanSettings) -> Plan:
        """Return the plan for a dataset of this length."""
        return cls(Order(num_samples, settings.order), settings)

    def num_batches(self, epoch: int) -> int:
        """Return how many batches an epoch has on this rank."""
        return self._num_full_steps(epoch) + (self._last_count(epoch, self.settings.rank) > 0)

    @property
    def trial_epoch(self) -> int | None:
        """An epoch whose first batch is like any first batch of this rank; None if the rank never has one."""
        shift = self.settings.shift
        epoch = shift.epoch + 1 if shift.num_samples else 0  # what is left of an epoch may be less than a batch
        return epoch if self.num_batches(epoch) else None

    def num_samples(self, epoch: int) -> int:
        """Return how many samples this rank's batches of an epoch have, padding included."""
        settings = self.settings
        return self._num_full_steps(epoch) * settings.batch_size + self._last_count(epoch, settings.rank)

    def batch(self, epoch: int, step: int) -> BatchPlan:
        """Return batch `step` of `epoch`.

        Raises:
            IndexError: `step` is not in `[0, num_batches)`.
        """
        return self.batches(epoch, step, step + 1)[0]

    def batches(self, epoch: int, first_step: int, stop_step: int) -> list[BatchPlan]:
        """Return the batches of several steps; far cheaper than one by one.

        Raises:
            IndexError: The steps are not within `[0, num_batches)`.
        """
        num_batches = self.num_batches(epoch)
        if not 0 <= first_step < stop_step <= num_batches:
            raise IndexError(f"steps [{first_step}, {stop_step}) are outside an epoch of {num_batches} batches")
        extents = [self._extent(epoch, step) for step in range(first_step, stop_step)]
        num_samples = self.order.num_samples
        # Wrapped around first as integers of Python, which have no bounds: with 10**30 ranks, starts are large.
        starts = [start % num_samples for start, _ in extents]
        counts = [count for _, count in extents]
        positions = np.concatenate(
            [np.arange(start, start + count, dtype=np.int64) for start, count in zip(starts, counts, strict=True)]
        )
        indices = self.order.indices(epoch, positions % num_samples)
        batches, taken = [], 0
        for step, (_, count) in zip(range(first_step, stop_step), extents, strict=True):
            batches.append(BatchPlan(indices[taken : taken + count], self.num_padding(epoch, step)))
            taken += count
        return batches

    def num_padding(self, epoch: int, step: int) -> int:
        """Return how many samples at the end of a batch are repeats."""
        start, count = self._extent(epoch, step)
        return max(0, min(count, start + count - self.order.num_samples))

    def position_after(self, epoch: int, step: int) -> Position:
        """Return where the run is when all ranks have had this step; after the last one that is the epoch's end."""
        reached = self._offset(epoch) + (step + 1) * self.settings.samples_per_step
        is_last = step + 1 >= self._num_full_steps(epoch) + (self._last_count(epoch, 0) > 0)  # rank 0 never has fewer
        return self.end_of(epoch) if is_last else Position(epoch, reached)

    def end_of(self, epoch: int) -> Position:
        """Return where an epoch ends, whatever was left out of it."""
        return Position(epoch, self.order.num_samples)

    def _offset(self, epoch: int) -> int:
        shift = self.settings.shift
        return shift.num_samples if epoch == shift.epoch else 0

    def _num_full_steps(self, epoch: int) -> int:
        return (self.order.num_samples - self._offset(epoch)) // self.settings.samples_per_step

    def _extent(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the first position and the number of samples of this rank's share of a step."""
        settings = self.settings
        first = self._offset(epoch) + step * settings.samples_per_step
        if step < self._num_full_steps(epoch):
            return first + settings.rank * settings.batch_size, settings.batch_size
        return first + self._last_before(epoch, settings.rank), self._last_count(epoch, settings.rank)

    def _last_count(self, epoch: int, rank: int) -> int:
        """Return how many samples a rank gets in the last, partial step; 0 when there is no such step for it."""
        return self._last_before(epoch, rank + 1) - self._last_before(epoch, rank)

    def _last_before(self, epoch: int, rank: int) -> int:
        """Return how many samples all ranks before this one get in the last, partial step."""
        settings = self.settings
        left = (self.order.num_samples - self._offset(epoch)) % settings.samples_per_step
        if settings.drop_last or not left:
            return 0
        if settings.uneven is Uneven.PAD:
            return rank * -(-left // settings.world_size)
        share, rest = divmod(left, settings.world_size)
        return rank * share + (min(rank, rest) if settings.uneven is Uneven.EXACT else 0)


class PlanReader:
    """Reads a plan step by step, computing a block of neighbouring steps at a time; O(block) memory."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._steps_per_block = max(1, BLOCK_POSITIONS // plan.settings.batch_size)
        self._block_key = (-1, -1)
        self._block: list[BatchPlan] = []

    def batch(self, epoch: int, step: int) -> BatchPlan:
        """Return what `plan.batch(epoch, step)` returns."""
        block_index, offset = divmod(step, self._steps_per_block)
        if self._block_key != (epoch, block_index):
            first = step - offset
            stop = min(first + self._steps_per_block, self.plan.num_batches(epoch))
            self._block = self.plan.batches(epoch, first, stop)
            self._block_key = (epoch, block_index)
        return self._block[offset]
