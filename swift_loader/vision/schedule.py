"""How many samples each batch of an epoch has, and which of several image sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol

__all__ = ["ConstantSchedule", "Schedule", "SizeSchedule", "Step"]


class Step(NamedTuple):
    """What a batch is, without its samples."""

    choice: int
    """Which image size."""
    num_samples: int


class Schedule(Protocol):
    """The batches of each epoch. The same on all ranks."""

    def steps(self, epoch: int) -> Sequence[Step]:
        """Return the batches of an epoch."""
        ...

    def __len__(self) -> int:
        """Return the number of batches of an epoch. It is the same in all epochs."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """Batches of one size."""

    num_items: int
    """How many samples an epoch has on each rank."""
    batch_size: int
    drop_last: bool
    """Whether to leave out an incomplete last batch."""
    num_batches: int | None
    """How many batches there are, whatever `num_items` is. None: as many as `num_items` gives."""

    def __len__(self) -> int:
        if self.num_batches is not None:
            return self.num_batches
        return self.num_items // self.batch_size if self.drop_last else -(-self.num_items // self.batch_size)

    def steps(self, epoch: int) -> Sequence[Step]:  # noqa: ARG002 - the same in each epoch
        """Return the batches of an epoch."""
        steps = [Step(0, self.batch_size)] * len(self)
        rest = self.num_items - self.batch_size * (len(self) - 1)
        if steps and self.num_batches is None and rest < self.batch_size:
            steps[-1] = Step(0, rest)
        return steps


class SizeSchedule:
    """Batches of several sizes, as timm's `ScheduledBatchSampler` chooses them. For the same seed, they are timm's."""

    def __init__(self, num_items: int, batch_sizes: Sequence[int], **options: Any) -> None:
        """Make a schedule.

        Args:
            num_items: How many samples an epoch has on each rank.
            batch_sizes: Samples of a batch, for each size of images.
            options: As of timm's sampler.

        Raises:
            ImportError: This timm has no such sampler.
            ValueError: No batch fits into an epoch.
        """
        try:
            from timm.data.scheduled_sampler import ScheduledBatchSampler
        except ImportError as error:
            raise ImportError(f"input_size_choices needs a newer timm: pip install -U timm ({error})") from error
        try:
            self._sampler = ScheduledBatchSampler(_Blanks(num_items), batch_sizes, **options)
        except ValueError as error:
            raise ValueError(
                f"batches of {list(batch_sizes)} samples don't fit into an epoch of {num_items} samples per rank; give "
                f"smaller ones in batch_size_choices ({error})"
            ) from None
        self.batch_sizes: tuple[int, ...] = self._sampler.batch_sizes
        self.average_batch_size: float = self._sampler.average_batch_size

    def __len__(self) -> int:
        return len(self._sampler)

    def steps(self, epoch: int) -> Sequence[Step]:
        """Return the batches of an epoch."""
        self._sampler.set_epoch(epoch)
        return [Step(batch[0][1], len(batch)) for batch in self._sampler]


class _Blanks:
    """In place of the sampler that timm's batch sampler draws from: here, only the sizes of its batches count."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[None]:
        return repeat(None, self._num_items)
