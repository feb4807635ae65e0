"""Who works for a loader: the workers that exist, those that are being started, and how many are wanted. Pure.

The ids 0 to n-1 are wanted. Each is that of one worker at most, or of one that is being started. A worker is known from
its first event on; before that, only its id is.
"""

from __future__ import annotations

from swift_loader.scheduler.events import Disconnected, Ready
from swift_loader.scheduler.workers import Worker


class Roster:
    """The workers of one scheduler. Not thread-safe."""

    def __init__(self, num_wanted: int | None) -> None:
        """Expect so many workers, with the ids from 0 on. None: as many as come; their number never changes."""
        self.num_wanted = num_wanted
        self.all: dict[int, Worker] = {}
        """By serial number; all but those that are GONE."""
        self._starting = set(range(num_wanted or 0))
        """Ids of workers that were started, and of which nothing was heard yet."""

    def is_wanted(self, worker: Worker) -> bool:
        """Return whether a worker with this id is wanted."""
        return self.num_wanted is None or worker.worker_id < self.num_wanted

    def missing(self) -> list[int]:
        """Return the ids that are wanted and that nobody has, in order."""
        taken = self._starting.union(worker.worker_id for worker in self.all.values())
        return [worker_id for worker_id in range(self.num_wanted or 0) if worker_id not in taken]

    def expect(self, worker_id: int) -> None:
        """Note that a worker with this id is started."""
        self._starting.add(worker_id)

    def meet(self, event: Ready | Disconnected) -> Worker:
        """Return the record of a worker. Its first event makes it."""
        self._starting.discard(event.worker_id)
        return self.all.setdefault(event.worker, Worker(event.worker, event.worker_id))

    def remove(self, worker: Worker) -> None:
        """Forget a worker that is GONE."""
        del self.all[worker.serial]

    def __repr__(self) -> str:
        wanted = "any" if self.num_wanted is None else self.num_wanted
        return f"<Roster of {len(self.all)} workers and {len(self._starting)} that start; {wanted} are wanted>"
