"""A stream that is cut into shards, one per worker. Stands for a source that the package doesn't have yet."""

from __future__ import annotations

from collections import deque

from swift_loader.scheduler.work import StreamWork, WorkSource


class StreamSource(WorkSource):
    """One epoch: a batch of each shard in turn."""

    def __init__(self, epoch: int, num_workers: int) -> None:
        self._epoch, self._step = epoch, 0
        self._open = deque(range(num_workers))
        """Those whose shards haven't ended. The next one is first."""
        self._turns = [0] * num_workers

    def next(self) -> StreamWork | None:
        """Return the next work; None once all shards have ended."""
        if not self._open:
            return None
        worker_id = self._open[0]
        self._open.rotate(-1)
        work = StreamWork(self._epoch, self._step, worker_id, self._turns[worker_id])
        self._turns[worker_id] += 1
        self._step += 1
        return work

    def end_shard(self, work: StreamWork) -> None:
        """Leave out this worker from now on."""
        if work.worker_id in self._open:
            self._open.remove(work.worker_id)

    def swap(self, work: StreamWork) -> StreamWork:
        """Hand out the next shard's work instead."""
        self._turns[work.worker_id] -= 1
        self._step -= 1
        instead = self.next()
        assert instead is not None
        return instead
