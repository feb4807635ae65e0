"""The batch sampler of `create_loader`: repeated samples, batches of several sizes, and a fixed number of batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from swift_loader.checks import check_integer
from swift_loader.samplers.passes import Pass, Passes, PassState
from swift_loader.sampling.permutation import Purpose, derive_key, derive_keys
from swift_loader.vision.places import Place
from swift_loader.vision.schedule import Schedule, SizeSchedule
from swift_loader.vision.shares import Share

__all__ = ["ImageBatches"]


class ImageBatches:
    """Yields the batches of a pass, as lists of places. `begin` chooses the pass."""

    def __init__(self, share: Share, schedule: Schedule) -> None:
        self.passes = Passes()
        """Positions are batches that the loop got."""
        self._share = share
        self._schedule = schedule
        self._begun = Pass(0, 0, PassState.READY)
        layout = [tuple(step) for step in schedule.steps(0)], float(share.num_repeats)
        self._checksum = zlib.crc32(repr(layout).encode())

    @property
    def num_items(self) -> int:
        """Samples of this rank in the next epoch, with those that come several times."""
        return sum(step.num_samples for step in self._schedule.steps(self.passes.epoch))

    def next_epoch(self) -> Iterator[list[Place]]:
        """Yield all batches of the next epoch, without beginning it."""
        return self._rest(self.passes.epoch, 0)

    def begin(self, this: Pass) -> None:
        """Let the next `iter` yield what is left of a pass."""
        self._begun = this

    def __iter__(self) -> Iterator[list[Place]]:
        return self._rest(self._begun.epoch, self._begun.position)

    def _rest(self, epoch: int, first: int) -> Iterator[list[Place]]:
        steps = self._schedule.steps(epoch)
        starts = [0, *accumulate(step.num_samples for step in steps)]
        share = self._share
        base = derive_key(share.order.seed, Purpose.SAMPLE.value, epoch, share.rank)
        for start, (choice, num_samples) in zip(starts[first:], steps[first:], strict=False):
            numbers = np.arange(start, start + num_samples, dtype=np.int64)
            keys = derive_keys(base, numbers.view(np.uint64)).tolist()
            indices = share.indices(epoch, numbers).tolist()
            yield [Place(index, choice, key) for index, key in zip(indices, keys, strict=True)]

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._schedule)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A pass that runs stays as it is."""
        self.passes.choose(check_integer("epoch", epoch, 0))

    @property
    def seed(self) -> int:
        """Seed of the order and of the draws."""
        return self._share.order.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._share = replace(self._share, order=replace(self._share.order, seed=seed))

    @property
    def facts(self) -> dict[str, int]:
        """What the batches depend on besides seed and epoch, for a saved state."""
        share = self._share
        return {
            "num_samples": share.num_samples,
            "num_replicas": share.world_size,
            "nearby_shuffle": share.order.window,
            "checksum of batch sizes and repeats": self._checksum,
        }

    @property
    def batch_sizes(self) -> Sequence[int]:
        """Samples per batch, for each size of images, as of timm's `ScheduledBatchSampler`."""
        return self._sizes.batch_sizes

    @property
    def average_batch_size(self) -> float:
        """Samples per batch, on average over the run, as of timm's `ScheduledBatchSampler`."""
        return self._sizes.average_batch_size

    @property
    def _sizes(self) -> SizeSchedule:
        if isinstance(self._schedule, SizeSchedule):
            return self._schedule
        raise AttributeError("without input_size_choices, all batches have the loader's batch_size")

    def __repr__(self) -> str:
        return f"<ImageBatches of {self._share.num_samples} samples, {self.passes!r}>"
