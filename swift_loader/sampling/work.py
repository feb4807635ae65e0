"""What the scheduler hands out to workers: which samples form a batch.

    PlannedWork   (epoch, step)                      the worker computes the indices, so nothing is sent or kept
    IndexWork     (epoch, step, indices, worker_id)  a sampler chose the keys; kept until delivered, if it gets lost
    StreamWork    (epoch, step, worker_id, turn)     a batch of a stream's shard, which only that worker can build

A source hands out work in the order of delivery.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from typing import Any, NamedTuple

from swift_loader.sampling.plan import Plan
from swift_loader.sampling.progress import Progress, Steps
from swift_loader.sampling.skips import Position


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
    """Hands out the work of one generation, in the order of delivery.

    The caller holds the engine's lock, and may be any thread.
    """

    def next(self) -> Work | None:
        """Return the next work; None if there is none left, or none now."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Hand out what isn't behind the loop, also what was handed out before. Called first of all."""

    def is_at(self, other: WorkSource, num_delivered: int, *, in_order: bool) -> bool:  # noqa: ARG002
        """Return whether the other one's first batch follows after this number of this one's. The plan is the same."""
        return False

    def end_shard(self, work: StreamWork) -> None:
        """Hand out no more work of this shard, which has no batch for `work`. Only called for `StreamWork`."""

    def swap(self, work: StreamWork) -> StreamWork:
        """Take back what was handed out last, and hand out the next shard's work instead.

        Only called for `StreamWork`. If there is no other shard, it is the same work again.
        """
        return work


class PlannedSource(WorkSource, Progress):
    """A loader's pass through an epoch of its plan. Its steps count those before the pass, too.

    It hands out the epochs after that as well, without end: the source of the next pass `is_at` what came before.
    """

    last: tuple[int, tuple[Any, ...]] | None = None
    """The step of the batch that the loop got last in the pass, and its failed samples."""

    def __init__(self, plan: Plan, begin: Position, first_step: int) -> None:
        """`begin`: where it begins or continues, which is where `first_step` begins."""
        self.begin, self.first_step = begin, first_step
        self.done = Steps(first_step)
        """The steps that are behind the loop, as far as that is settled."""
        self.replan(plan)
        self.rewind()

    def replan(self, plan: Plan) -> None:
        """Go on with a plan whose steps up to here are the same, once it is rewound."""
        self.plan, self.num_batches = plan, plan.num_batches(self.begin.epoch)

    @property
    def steps(self) -> Steps:
        """The steps of the epoch that are behind the loop."""
        return self.present().done

    @property
    def has_all(self) -> bool:
        """Whether the loop got all batches of this rank."""
        return self.is_over or self.steps.first >= self.num_batches

    @property
    def position(self) -> Position:
        """The position after the last batch that the loop got in order."""
        epoch, num_steps = self.begin.epoch, self.steps.first
        if self.is_over:  # another rank may have one more batch
            return self.plan.end_of(epoch)
        return self.begin if num_steps == self.first_step else self.plan.position_after(epoch, num_steps - 1)

    def _count(self, got: Any) -> None:
        self.done.note(got.work.step)
        self.last = got.work.step, got.failures

    def _detach(self) -> None:
        self.done = copy(self.done)

    def rewind(self) -> None:
        """See `WorkSource`."""
        plan, epoch, done = self.plan, self.begin.epoch, self.done
        self._handed, self._ahead = plan, done.ahead
        self._from = self._epoch, self._step = epoch, done.first
        self._stop = plan.num_batches(epoch)
        self._first_regular = max(epoch, plan.last_irregular_epoch) + 1
        """From this epoch on, all have the same number of batches."""
        self._num_regular = plan.num_batches(self._first_regular)

    def next(self) -> PlannedWork | None:
        """Return the next work; None if no epoch has any."""
        while self._epoch == self._from[0] and self._step in self._ahead:
            self._step += 1
        while self._step >= self._stop:
            if not self._num_regular:
                return None
            self._epoch, self._step = self._epoch + 1, 0
            is_regular = self._epoch >= self._first_regular
            self._stop = self._num_regular if is_regular else self._handed.num_batches(self._epoch)
        work = PlannedWork(self._epoch, self._step)
        self._step += 1
        return work

    def is_at(self, other: WorkSource, num_delivered: int, *, in_order: bool) -> bool:
        """See `WorkSource`."""
        if not isinstance(other, PlannedSource) or self._ahead or other.done.ahead:
            return False
        epoch, step = self._from
        position = self._position_of(epoch, step + num_delivered)
        # Out of order, a count tells which batches were delivered only between two epochs.
        is_known = in_order or not num_delivered or not position[1]
        return is_known and position == self._position_of(other.begin.epoch, other.done.first)

    def _position_of(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the epoch and the step that so many steps after the beginning of an epoch are."""
        while epoch < self._first_regular and step >= (num_batches := self._handed.num_batches(epoch)):
            epoch, step = epoch + 1, step - num_batches
        if epoch < self._first_regular or not self._num_regular:
            return epoch, step
        return epoch + step // self._num_regular, step % self._num_regular


class StreamRounds(WorkSource):
    """One batch of each shard in turn, as torch does, until all shards are over."""

    def __init__(
        self,
        epoch: int,
        num_workers: int,
        *,
        first_step: int = 0,
        last_worker: int = -1,
        first_batches: Sequence[int] | None = None,
    ) -> None:
        """Begin with work number `first_step`.

        `last_worker`: whose batch was the last one before; -1: begin with worker 0. `first_batches`: if the loader
        shares the stream out, the number of each worker's first batch. Each builds every `num_workers`-th one.
        """
        self._epoch, self._step = epoch, first_step
        self._distance = 1 if first_batches is None else num_workers
        self._turns = [0] * num_workers if first_batches is None else list(first_batches)
        """The turn that each worker gets next."""
        self._left = set(range(num_workers))
        """The workers whose shards aren't known to be over."""
        self._ends: dict[int, int] = {}
        """The first turn that each of the others had no batch for."""
        self._last_worker = last_worker

    def next(self) -> StreamWork | None:
        """Return the next work; None if all shards are over."""
        if not self._left:
            return None
        num_workers = len(self._turns)
        following = (
            number % num_workers for number in range(self._last_worker + 1, self._last_worker + 1 + num_workers)
        )
        self._last_worker = worker_id = next(number for number in following if number in self._left)
        work = StreamWork(self._epoch, self._step, worker_id, self._turns[worker_id])
        self._turns[worker_id] += self._distance
        self._step += 1
        return work

    def end_shard(self, work: StreamWork) -> None:
        """Hand out no more work of this worker's shard."""
        self._left.discard(work.worker_id)
        self._ends.setdefault(work.worker_id, work.turn)

    def swap(self, work: StreamWork) -> StreamWork:
        """Hand out the next shard's work in place of this one, which was the last."""
        self._turns[work.worker_id] -= self._distance
        self._step -= 1
        instead = self.next()
        assert instead is not None, "the shard of what is taken back isn't over"
        return instead

    def end_of(self, worker_id: int) -> int | None:
        """Return the first turn that this worker has no batch for. None: not known. Any thread."""
        return self._ends.get(worker_id)
