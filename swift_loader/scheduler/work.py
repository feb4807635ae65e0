"""What the scheduler hands out to workers: which samples form a batch.

    PlannedWork   (epoch, step)                      the worker computes the indices, so nothing is sent or kept
    IndexWork     (epoch, step, indices, worker_id)  a sampler chose the keys; kept until delivered, if it gets lost
    StreamWork    (epoch, step, worker_id, turn)     a batch of a stream's shard, which only that worker can build

A source hands out work in the order of delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol


class PlannedWork(NamedTuple):
    """A batch that follows from the plan."""

    epoch: int
    step: int

    @property
    def key(self) -> Hashable:
        """The same for the same batch of another generation."""
        return self


class IndexWork(NamedTuple):
    """A batch whose samples a sampler chose."""

    epoch: int
    step: int
    indices: Any
    """A list or an `IndexArray` of dataset indices, other keys of the dataset, or a single key."""
    worker_id: int | None = None
    """The only worker that may build it. None: any worker."""

    @property
    def key(self) -> Hashable:
        """The same for the same batch of another generation."""
        return self.epoch, self.step


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

    @property
    def key(self) -> Hashable:
        """The same for the same batch of another generation."""
        return self.epoch, self.worker_id, self.turn


Work = PlannedWork | IndexWork | StreamWork


class WorkSource(Protocol):
    """Hands out the work of one generation, in the order of delivery."""

    def next(self) -> Work | None:
        """Return the next work; None if there is none left."""
        ...

    def end_shard(self, work: StreamWork) -> None:
        """Hand out no more work of this shard, which has no batch for `work`. Only called for `StreamWork`."""
        ...

    def swap(self, work: StreamWork) -> StreamWork:
        """Take back what was handed out last, and hand out the next shard's work instead.

        Only called for `StreamWork`. If there is no other shard, it is the same work again.
        """
        ...


class PlannedSource:
    """The batches of a plan from a position on, across the ends of epochs, without end."""

    def __init__(
        self, epoch: int, step: int, num_batches: Callable[[int], int], last_irregular_epoch: int | None = None
    ) -> None:
        """Begin at a batch. `num_batches` returns how many an epoch has.

        `last_irregular_epoch`: all later epochs have the same number of batches, and no epoch has more. None: `epoch`.
        """
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

    def end_shard(self, work: StreamWork) -> None:
        """Do nothing: a plan has no shards."""

    def swap(self, work: StreamWork) -> StreamWork:
        """Return the same: a plan has no shards."""
        return work
