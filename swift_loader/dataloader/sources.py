"""The work of a DataLoader's epoch: drawn from a sampler, or turns of a stream's shards. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from swift_loader.scheduler.work import IndexWork, StreamWork, WorkSource


class IndexQueue(WorkSource):
    """Work that the loop's thread has drawn. A sampler is the user's code, so no other thread may run it."""

    def __init__(self, epoch: int, num_workers: int, *, in_order: bool) -> None:
        """Be empty. With `in_order`, worker i builds every n-th batch from batch i on, as with torch.

        Then a dataset that has a generator of its own in each worker draws the same in each run. Otherwise any worker
        builds any batch.
        """
        self._epoch = epoch
        self._num_workers = num_workers if in_order else 0
        self._drawn: deque[IndexWork] = deque()

    def unbind(self) -> None:
        """Let any worker build any batch that isn't handed out yet. Any thread."""
        self._num_workers = 0

    def put(self, step: int, indices: Any) -> None:
        """Add the next batch."""
        worker_id = step % self._num_workers if self._num_workers else None
        self._drawn.append(IndexWork(self._epoch, step, indices, worker_id))

    def next(self) -> IndexWork | None:
        """Return the next work; None if nothing more is drawn yet."""
        if not self._drawn:
            return None
        work = self._drawn.popleft()
        return work if self._num_workers or work.worker_id is None else work._replace(worker_id=None)


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
