"""Maps (epoch, step, rank) to the samples of a batch: pure arithmetic, the same in every process.

Guarantees: every result is a function of the arguments alone. Memory is O(batch), independent of the dataset's size.
Each batch of each epoch takes the same time, so seeking is O(1). Nothing depends on the number of workers.

    epoch, step, rank ──► places in what isn't left out ──► positions in the epoch ──► order ──► dataset indices

A place is the position among those samples of the epoch that aren't left out, see `skips`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.shuffle import Order, OrderSettings
from swift_loader.sampling.skips import NO_GAPS, NO_INDICES, NO_SKIPS, Gaps, Position, SkippedRange, Skips

NO_SHIFT = Position(0, 0)

MAX_EPOCH = 2**62 - 1
"""The largest epoch that fits into the messages to the workers."""

BLOCK_POSITIONS = 8192
"""Number of positions that a `PlanReader` permutes at once. 256 positions take 0.4 ms, 8,192 take 0.9 ms. More would
need over 1 MB."""

MAX_PLANS = 64
"""So many are remembered. A plan changes when a state is loaded or a batch is skipped, not with each epoch."""


class Uneven(str, Enum):
    """What happens in the last step of an epoch, if the remaining samples don't fill it on all ranks."""

    PAD = "pad"
    """Split the samples evenly. Ranks that would have one sample less repeat samples from the epoch's start."""
    DROP = "drop"
    """Split the samples evenly, and leave out those that can't be split."""
    EXACT = "exact"
    """Split the samples without padding or loss. Ranks may differ by one sample, and so by one batch."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Everything that a plan depends on, except the dataset's length."""

    order: OrderSettings
    batch_size: int
    world_size: int
    rank: int
    uneven: Uneven
    drop_last: bool
    shift: Position = NO_SHIFT
    """Where the first step of one epoch begins, without skipped samples, if that was resumed with another batch size or
    number of ranks: `num_samples` is less than a step has."""
    skips: Skips = NO_SKIPS

    @classmethod
    def of_seed(cls, seed: int) -> PlanSettings:
        """Return settings that carry a seed, and nothing else that matters: others choose the samples."""
        order = OrderSettings.of(seed=seed, shuffle=False, window=None, batch_size=1)
        return cls(order=order, batch_size=1, world_size=1, rank=0, uneven=Uneven.PAD, drop_last=False)

    @property
    def samples_per_step(self) -> int:
        """Number of samples of a full step, over all ranks."""
        return self.batch_size * self.world_size


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch of one rank."""

    indices: NDArray[np.int64]
    """`(n,)` dataset indices, in the order of the samples."""
    num_padding: int
    """How many samples at the end are padding: they repeat the epoch's first samples, so that all ranks have the same
    number of samples."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The epochs of one rank, cut into batches.

    For batch size B and R ranks, global step s uses positions `[s*B*R, (s+1)*B*R)`. Rank r uses the r-th B of them. So
    after any step, the samples that all ranks have used are a prefix of the order, and a run with any other B and R can
    resume there. If the prefix isn't a multiple of the new B*R, all steps of that epoch are shifted by the remainder.

    Skipped samples and excluded rows are taken out of the order before it is cut. Skipping whole steps leaves all other
    steps as they are, and those after it move up. Only padding may differ: it repeats the first samples that are left,
    and in the epoch in which rows are excluded, those after that.
    """

    order: Order
    settings: PlanSettings

    @classmethod
    def of(cls, num_samples: int, settings: PlanSettings) -> Plan:
        """Return the plan for a dataset of this length."""
        return cls(Order(num_samples, settings.order), settings)

    def resumed_at(self, position: Position) -> tuple[Plan, int]:
        """Return a plan with which a step begins at this position, and the number of that step.

        The shift of a past epoch is kept, so that batches already planned beyond that epoch's end stay valid.
        """
        settings = self.settings
        step, rest = divmod(self.gaps(position.epoch).place_of(position.num_samples), settings.samples_per_step)
        if not rest and position.epoch > settings.shift.epoch:
            return self, step
        shift = Position(position.epoch, rest) if rest else NO_SHIFT
        return replace(self, settings=replace(settings, shift=shift)), step

    def gaps(self, epoch: int) -> Gaps:
        """Return the positions of an epoch that are left out. Those of the last epochs are remembered."""
        order, skips, mix = self.order, self.settings.skips, self.order.settings.mix
        last_change = 0 if mix is None else mix.last_change(epoch)
        if not skips.ranges and not skips.exclusions and not last_change:
            return NO_GAPS
        if (known := skips.gaps.get((order, epoch))) is not None:
            return known
        steps = [(one.begin, one.end) for one in skips.ranges if one.epoch == epoch]
        exclusions = [one for one in skips.exclusions if one.since.epoch <= epoch]
        rows = [one.rows for one in exclusions]
        floors = [one.since.num_samples if one.since.epoch == epoch else 0 for one in exclusions]
        found = order.positions(epoch, np.concatenate(rows)) if rows else NO_INDICES
        found = found[found >= np.repeat(np.array(floors, np.int64), [one.size for one in rows])]
        begins, ends = np.array(steps, np.int64).reshape(-1, 2).T
        gaps = Gaps(np.concatenate([begins, found]), np.concatenate([ends, found + 1]))
        places = [gaps.place_of(floor) for floor in (*floors, last_change)]
        gaps.first_repeated = max((one for one in places if one < order.num_samples - gaps.num_positions), default=0)
        if len(skips.gaps) > len(skips.exclusions) + 1:
            skips.gaps.clear()
        skips.gaps[order, epoch] = gaps
        return gaps

    def others(self, index: int) -> tuple[int, int, Gaps]:
        """Return which samples may take the place of one: the first index of its dataset, their number, and the gaps.

        The gaps are that sample and all excluded rows. The dataset of a mixture's sample is its source, because others
        may have the weight 0.
        """
        first, length, skips, mix = 0, self.order.num_samples, self.settings.skips, self.order.settings.mix
        if mix is not None:
            source, row, _ = mix.locate(index)
            first, length, skips = index - row, mix.lengths[source], dict(mix.excluded).get(source, NO_SKIPS)
        rows = np.concatenate([np.array([index - first]), *(one.rows for one in skips.exclusions)])
        gaps = Gaps(rows, rows + 1)
        return first, length - gaps.num_positions, gaps

    @property
    def whole(self) -> Plan:
        """Rank 0's plan, which never has fewer batches than others', if the run never skipped a step and never stopped.

        It is without excluded rows: they belong to no step.
        """
        skips = replace(self.settings.skips, ranges=())
        return Plan(self.order, replace(self.settings, rank=0, shift=NO_SHIFT, skips=skips))

    def num_batches(self, epoch: int) -> int:
        """Return how many batches an epoch has on this rank."""
        return self._num_full_steps(epoch) + (self._last_count(epoch, self.settings.rank) > 0)

    @property
    def last_irregular_epoch(self) -> int:
        """The last epoch that may have other batches than later ones: a part of it is left out or came before.

        All later epochs have the same number of batches. -1 if this holds for all epochs.
        """
        shift = self.settings.shift
        return max(self.settings.skips.last_epoch, shift.epoch if shift.num_samples else -1)

    def num_samples(self, epoch: int) -> int:
        """Return how many samples this rank's batches of an epoch have, including padding."""
        settings = self.settings
        return self._num_full_steps(epoch) * settings.batch_size + self._last_count(epoch, settings.rank)

    def batch(self, epoch: int, step: int) -> BatchPlan:
        """Return batch `step` of `epoch`."""
        return self.batches(epoch, step, step + 1)[0]

    def batches(self, epoch: int, first_step: int, stop_step: int) -> list[BatchPlan]:
        """Return the batches of several steps. This is much faster than one by one.

        An IndexError if the steps aren't within `[0, num_batches)`.
        """
        num_batches = self.num_batches(epoch)
        if not 0 <= first_step < stop_step <= num_batches:
            raise IndexError(f"steps [{first_step}, {stop_step}) are outside an epoch of {num_batches} batches")
        num_full = self._num_full_steps(epoch)
        extents = [self._extent(epoch, step, num_full) for step in range(first_step, stop_step)]
        num_samples, gaps = self._num_left(epoch), self.gaps(epoch)
        first, num_repeated = gaps.first_repeated, num_samples - gaps.first_repeated
        # Wrap around in Python's integers, which can't overflow: with 10**30 ranks, starts are large.
        starts = [start if start < num_samples else first + (start - first) % num_repeated for start, _ in extents]
        places = np.concatenate(
            [np.arange(start, start + count, dtype=np.int64) for start, (_, count) in zip(starts, extents, strict=True)]
        )
        is_padding = places >= num_samples
        places[is_padding] = first + (places[is_padding] - first) % num_repeated
        indices = self.order.indices(epoch, gaps.positions_of(places))
        batches, taken = [], 0
        for start, count in extents:
            num_padding = max(0, min(count, start + count - num_samples))
            batches.append(BatchPlan(indices[taken : taken + count], num_padding))
            taken += count
        return batches

    def position_after(self, epoch: int, step: int) -> Position:
        """Return the position after all ranks have had this step, and after what is skipped there.

        After the last step it is the epoch's end.
        """
        reached = self._offset(epoch) + (step + 1) * self.settings.samples_per_step
        is_last = step + 1 >= self._num_full_steps(epoch) + (self._last_count(epoch, 0) > 0)  # rank 0 never has fewer
        if is_last:
            return self.end_of(epoch)
        return Position(epoch, self.gaps(epoch).position_of(reached))

    def end_of_step(self, epoch: int, step: int) -> Position:
        """Return the position after a step's last sample, which a later skip doesn't change."""
        gaps = self.gaps(epoch)
        if not gaps.num_positions:
            return self.position_after(epoch, step)
        reached = min(self._offset(epoch) + (step + 1) * self.settings.samples_per_step, self._num_left(epoch))
        return Position(epoch, gaps.position_of(reached - 1) + 1)

    def range_of(self, epoch: int, step: int) -> SkippedRange:
        """Return the positions of a step, of all ranks together. The last step has all that is left.

        Steps are counted from the epoch's first sample, see `whole`. An IndexError if the epoch has no such step.
        """
        whole = self.whole
        num_steps, gaps, begin = whole.num_batches(epoch), whole.gaps(epoch), step * self.settings.samples_per_step
        if not 0 <= step < num_steps:
            raise IndexError(f"step {step} is outside an epoch of {num_steps} steps")
        after = begin + self.settings.samples_per_step
        end = self.order.num_samples if step == num_steps - 1 else gaps.position_of(after)
        return SkippedRange(epoch, gaps.position_of(begin), end)

    def step_of(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the step that has the sample at a position, as in `range_of`, and how many samples it has before."""
        return divmod(self.whole.gaps(epoch).place_of(position), self.settings.samples_per_step)

    def number_in_epoch(self, epoch: int, step: int) -> int:
        """Return which step of the epoch a step is if skipped ones count, as in `range_of`.

        After a skip or a resume with other batches, it is the step that has its first sample.
        """
        gaps = self.gaps(epoch)
        if not gaps.num_positions:
            return step
        first = self._offset(epoch) + step * self.settings.samples_per_step
        return self.step_of(epoch, gaps.position_of(first))[0]

    def has_whole_steps_in(self, asked: SkippedRange) -> bool:
        """Return whether what isn't skipped of a range is whole steps of this plan, so that all others can stay."""
        epoch, gaps, per_step = asked.epoch, self.gaps(asked.epoch), self.settings.samples_per_step
        begin, end = (gaps.place_of(position) - self._offset(epoch) for position in (asked.begin, asked.end))
        is_end = end % per_step == 0 or asked.end == self.order.num_samples
        return begin == end or (begin % per_step == 0 and is_end)

    def end_of(self, epoch: int) -> Position:
        """Return the end of an epoch. Samples that were left out count as used."""
        return Position(epoch, self.order.num_samples)

    def _offset(self, epoch: int) -> int:
        shift = self.settings.shift
        return shift.num_samples if epoch == shift.epoch else 0

    def _num_left(self, epoch: int) -> int:
        """Return how many samples of an epoch aren't left out."""
        return self.order.num_samples - self.gaps(epoch).num_positions

    def _num_full_steps(self, epoch: int) -> int:
        return (self._num_left(epoch) - self._offset(epoch)) // self.settings.samples_per_step

    def _extent(self, epoch: int, step: int, num_full: int) -> tuple[int, int]:
        """Return the first place and the number of samples of this rank's part of a step, of which so many are full."""
        settings = self.settings
        first = self._offset(epoch) + step * settings.samples_per_step
        if step < num_full:
            return first + settings.rank * settings.batch_size, settings.batch_size
        return first + self._last_before(epoch, settings.rank), self._last_count(epoch, settings.rank)

    def _last_count(self, epoch: int, rank: int) -> int:
        """Return how many samples a rank gets in the last, partial step; 0 if it has no such step."""
        return self._last_before(epoch, rank + 1) - self._last_before(epoch, rank)

    def _last_before(self, epoch: int, rank: int) -> int:
        """Return how many samples all lower ranks together get in the last, partial step."""
        settings = self.settings
        left = (self._num_left(epoch) - self._offset(epoch)) % settings.samples_per_step
        if settings.drop_last or not left:
            return 0
        if settings.uneven is Uneven.PAD:
            return rank * -(-left // settings.world_size)
        share, rest = divmod(left, settings.world_size)
        return rank * share + (min(rank, rest) if settings.uneven is Uneven.EXACT else 0)


class PlanReader:
    """Reads a plan step by step. It computes a block of consecutive steps at a time; memory is O(block)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._steps_per_block = max(1, BLOCK_POSITIONS // plan.settings.batch_size)
        self._block_key = (-1, -1)
        self._block: list[BatchPlan] = []

    def batch(self, epoch: int, step: int) -> BatchPlan:
        """Return the same as `plan.batch(epoch, step)`."""
        block_index, offset = divmod(step, self._steps_per_block)
        if self._block_key != (epoch, block_index):
            first = step - offset
            stop = min(first + self._steps_per_block, self.plan.num_batches(epoch))
            self._block = self.plan.batches(epoch, first, stop)
            self._block_key = (epoch, block_index)
        return self._block[offset]


class PastPlans:
    """Remembers which plan a loader had when, so that a batch of the past can be named.

    One thread adds plans; any thread may ask.
    """

    def __init__(self) -> None:
        self._plans: deque[tuple[int, Plan]] = deque(maxlen=MAX_PLANS)
        """Each with the time from which it was used."""

    def note(self, now_ns: int, plan: Plan) -> None:
        """Record that a plan is used from now on."""
        if not self._plans or self._plans[-1][1] != plan:
            self._plans.append((now_ns, plan))

    def indices_of(self, epoch: int, step: int, delivered_ns: int) -> NDArray[np.int64]:
        """Return the dataset indices of a batch that was delivered at this time, `(n,)`.

        None if the plan of that time isn't remembered.
        """
        plan = next((plan for since_ns, plan in reversed(tuple(self._plans)) if since_ns <= delivered_ns), None)
        if plan is None or step >= plan.num_batches(epoch):
            return np.empty(0, np.int64)
        return plan.batch(epoch, step).indices
