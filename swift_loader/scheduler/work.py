"""What the scheduler hands out to workers: which samples form a batch.

    PlannedWork   (epoch, step)                      the worker computes the indices, so nothing is sent or kept
    IndexWork     (epoch, step, indices, worker_id)  a sampler chose the keys; kept until delivered, if it gets lost
    StreamWork    (epoch, step, worker_id, turn)     a batch of a stream's shard, which only that worker can build

A source hands out work in the order of delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class PlannedWork(NamedTuple):
    """A batch that follows from the plan."""

    epoch: int
    step: int


class IndexWork(NamedTuple):
    """A batch whose samples a sampler chose."""

    epoch: int
    step: int
    indices: Any
    """A list or an `IndexArray` of dataset indices, other keys of the dataset, or a single key."""
    worker_id: int | None = None
    """The only worker that may build it. None: any worker."""


class StreamWork(NamedTuple):
    """A batch of a shard of a stream."""

    epoch: int
    step: int
    """Counts the batches that were handed out. Some of them may lie beyond the end of their shard."""
    worker_id: int
    """Which worker: each has a shard."""
    turn: int
    """Which batch of the shard in this generation, from 0. If the shard is resumed, 0 is the first batch after that.
    If the loader shares the stream out: which batch of the whole stream."""


Work = PlannedWork | IndexWork | StreamWork


def key_of(work: Work) -> Hashable:
    """Return what is the same for the same batch of another generation."""
    return (work.epoch, work.worker_id, work.turn) if isinstance(work, StreamWork) else (work.epoch, work.step)


class WorkSource:
    """Hands out the work of one generation, in the order of delivery."""

    def next(self) -> Work | None:
        """Return the next work; None if there is none left, or none now."""
        raise NotImplementedError

    def end_shard(self, work: StreamWork) -> None:
        """Hand out no more work of this shard, which has no batch for `work`. Only called for `StreamWork`."""

    def swap(self, work: StreamWork) -> StreamWork:
        """Take back what was handed out last, and hand out the next shard's work instead.

        Only called for `StreamWork`. If there is no other shard, it is the same work again.
        """
        return work


class PlannedSource(WorkSource):
    """The batches of a plan from a position on, across the ends of epochs, without end."""

    def __init__(
        self, epoch: int, step: int, num_batches: Callable[[int], int], last_irregular_epoch: int | None = None
    ) -> None:
        """Begin at a batch. `num_batches` returns how many an epoch has.

        `last_irregular_epoch`: all later epochs have the same number of batches, and no epoch has more. None: `epoch`.
        """
        self._begin = epoch, step
        self._epoch, self._step = epoch, step
        self._num_batches = num_batches
        self._stop = num_batches(epoch)
        self._first_regular = max(epoch, -1 if last_irregular_epoch is None else last_irregular_epoch) + 1
        self._num_regular = num_batches(self._first_regular)

    def next(self) -> PlannedWork | None:
        """Return the next work; None if no epoch has any."""
        while self._step >= self._stop:
            if not self._num_regular:
                return None
            self._epoch, self._step = self._epoch + 1, 0
            is_regular = self._epoch >= self._first_regular
            self._stop = self._num_regular if is_regular else self._num_batches(self._epoch)
        work = PlannedWork(self._epoch, self._step)
        self._step += 1
        return work

    def is_at(self, other: PlannedSource, num_delivered: int, *, in_order: bool) -> bool:
        """Return whether the other one's first batch follows after this number of this one's. The plan is the same."""
        position = self._position_after(num_delivered)
        # Out of order, a count tells which batches were delivered only between two epochs.
        is_known = in_order or not num_delivered or not position[1]
        return is_known and position == other._position_after(0)

    def _position_after(self, num_delivered: int) -> tuple[int, int]:
        epoch, step = self._begin[0], self._begin[1] + num_delivered
        while epoch < self._first_regular and step >= (num_batches := self._num_batches(epoch)):
            epoch, step = epoch + 1, step - num_batches
        if epoch < self._first_regular or not self._num_regular:
            return epoch, step
        return epoch + step // self._num_regular, step % self._num_regular
