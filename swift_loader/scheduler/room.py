"""Finds the worker with the least to do among those that have room for a task. Pure, not thread-safe.

The time hardly depends on the number of workers. They are in a heap, by load, under these rules:

- A worker that gets more to do keeps its entry. `least` corrects the entry when it is the first one.
- A worker that gets less to do gets another entry. `least` removes the old one when it is the first one.
- A worker without room loses its entry when that is the first one. It gets another when it has room again.

So no entry of a worker with room is beyond its load, and the first one that is right belongs to the least load.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from swift_loader.scheduler.worker_queue import MAX_TASKS, Load, Queue

MAX_HELD = 2 * MAX_TASKS
"""Tasks that a worker may have, with those of earlier generations."""

MIN_ENTRIES = 64
"""Old entries are removed when there are so many more than twice the workers, which is O(1) per entry."""


class Room:
    """The open workers: those that get tasks."""

    def __init__(self, share: int, max_ready: int) -> None:
        """Know no worker yet. For the arguments see `use`."""
        self._share = share
        self._max_ready = max_ready
        self._open: dict[int, Queue] = {}
        """By serial number."""
        self._by_id: dict[int, list[Queue]] = {}
        """The open workers with each id. One, apart from short times."""
        self._entries: list[Load] = []
        """A heap."""
        self._ready_full: dict[int, Queue] = {}
        """Workers that have room for tasks, but the maximum of READY batches. Some may have changed since."""

    def use(self, share: int, max_ready: int) -> None:
        """Let each worker have fewer than `share` tasks and `max_ready` READY batches before it gets a task."""
        may_have_more = share > self._share or max_ready > self._max_ready
        self._share, self._max_ready = share, max_ready
        if may_have_more:
            self.look_again()

    def open(self, queue: Queue) -> None:
        """Give tasks to this worker from now on. Idempotent."""
        if queue.serial not in self._open:
            self._open[queue.serial] = queue
            self._by_id.setdefault(queue.worker_id, []).append(queue)
            self.note_less(queue)

    def close(self, serial: int) -> None:
        """Give this worker no more tasks. Idempotent."""
        queue = self._open.pop(serial, None)
        if queue is None:
            return
        queue.entry = None
        self._ready_full.pop(serial, None)
        namesakes = self._by_id[queue.worker_id]
        namesakes.remove(queue)
        if not namesakes:
            del self._by_id[queue.worker_id]

    def note_less(self, queue: Queue) -> None:
        """Record that a worker, which may be closed, has less to do than before. For each batch, so it is quick."""
        num_tasks, num_current = len(queue.tasks), queue.num_current
        if num_current >= queue.max_tasks or num_current >= self._share or num_tasks >= MAX_HELD:
            return
        if queue.serial not in self._open:
            return
        if queue.num_ready >= self._max_ready:
            self._ready_full[queue.serial] = queue
            return
        load = num_tasks, queue.num_ready, queue.worker_id, queue.serial
        if queue.entry is None or load < queue.entry:
            queue.entry = load
            heappush(self._entries, load)
            if len(self._entries) > 2 * len(self._open) + MIN_ENTRIES:
                self.look_again()

    def look_again(self) -> None:
        """Look at each worker: many may have less to do than before. O(workers)."""
        self._ready_full.clear()
        self._entries.clear()
        for queue in self._open.values():
            queue.entry = None
            self.note_less(queue)

    def least(self) -> int | None:
        """Return the worker with the least to do; None if none has room."""
        entries = self._entries
        while entries:
            entry = entries[0]
            queue = self._open.get(entry[3])
            if queue is None or queue.entry is not entry:
                heappop(entries)
                continue
            num_tasks, num_ready, num_current = len(queue.tasks), queue.num_ready, queue.num_current
            has_room = num_current < queue.max_tasks and num_current < self._share and num_tasks < MAX_HELD
            if not has_room or num_ready >= self._max_ready:
                heappop(entries)
                queue.entry = None
                self.note_less(queue)  # for `least_for_lost`
            elif num_tasks == entry[0] and num_ready == entry[1]:
                return entry[3]
            else:
                queue.entry = num_tasks, num_ready, queue.worker_id, queue.serial
                heapreplace(entries, queue.entry)
        return None

    def least_for_lost(self) -> int | None:
        """Return the same as `least`, but a worker may have any number of READY batches."""
        loads = [] if self.least() is None else [self._entries[0]]
        for queue in list(self._ready_full.values()):
            if queue.num_ready < self._max_ready or not self._has_room_for_tasks(queue, queue.max_tasks):
                del self._ready_full[queue.serial]
            else:
                loads.append(queue.load)
        return min(loads)[3] if loads else None

    def least_of_id(self, worker_id: int, max_ready: float) -> int | None:
        """Return the worker with this id that has the least to do; None if none has room.

        With `max_ready` READY batches, a worker has no room.
        """
        loads = [
            queue.load
            for queue in self._by_id.get(worker_id, ())
            # What only this worker may build may as well wait there.
            if queue.num_ready < max_ready and self._has_room_for_tasks(queue, MAX_TASKS)
        ]
        return min(loads)[3] if loads else None

    def _has_room_for_tasks(self, queue: Queue, max_tasks: int) -> bool:
        num_current = queue.num_current
        return num_current < max_tasks and num_current < self._share and len(queue.tasks) < MAX_HELD

    def __repr__(self) -> str:
        return f"<Room at {len(self._open)} workers, {len(self._entries)} entries>"
