"""Records which tasks each worker has, and which workers have room for more. Not thread-safe.

A worker does its tasks in order, so it is building the first of them, and each answer is about that one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.room import Room
from swift_loader.scheduler.work import PlannedWork, Work
from swift_loader.scheduler.worker_queue import MAX_TASKS, Queue, Task

QUEUED_S = 0.001
"""Work that should wait in a worker's pipe, so that the worker isn't idle while the trainer's thread wakes up."""

MIN_TASKS = 2
"""One that is being built and one that waits. More would bind batches to a worker that may be slow."""

STEADY_S = 0.01
"""How much the time to build a batch may vary, in order, for a second task to wait at the worker: ten times the time
that a waiting task saves. Behind a slow batch, the task would hold up all later ones, which others have built."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far ahead of the loop the workers may work."""

    max_in_flight: int
    """Batches of all workers that are being built or wait for the loop."""
    max_ready_per_worker: int
    """Batches of one worker that may wait for the loop. At this number, the worker gets no new task."""
    max_tasks: int
    """Tasks that may wait in a worker's pipe."""
    in_order: bool
    """False delivers batches as soon as they are ready, within an epoch."""
    num_expected: int = 0
    """Until so many workers are there, each has at most one task. Datasets may wait for each other in all of them."""

    def max_of_worker(self, num_workers: int) -> int:
        """Return how many batches of one of so many workers may be built or waiting at a time."""
        return min(self.max_in_flight, self.max_ready_per_worker + min(self.max_tasks, self.share(num_workers)))

    def share(self, num_workers: int) -> int:
        """Return how many tasks one of so many workers may have at a time."""
        return max(1, self.max_in_flight // max(1, num_workers))


class Queues:
    """The tasks of all workers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queues: dict[int, Queue] = {}
        """By the worker's serial number."""
        self._room = Room(self._share, limits.max_ready_per_worker)
        """Knows which of them get tasks."""

    def use_limits(self, limits: Limits) -> None:
        """Hold to these limits from now on."""
        self._limits = limits
        self._note_number()

    def add(self, serial: int, worker_id: int) -> None:
        """Give tasks to this worker from now on."""
        queue = self._queues[serial] = Queue(serial, worker_id, self._task_limit(math.inf, 0.0))
        self._room.open(queue)
        self._note_number()

    def reopen(self, serial: int) -> None:
        """Give tasks to a worker that was retired."""
        self._room.open(self._queues[serial])

    def retire(self, serial: int) -> None:
        """Give this worker no more tasks. It may still answer those that it has. Idempotent."""
        self._room.close(serial)

    def remove(self, serial: int) -> list[Task]:
        """Forget a worker, which may be unknown. Return its tasks."""
        self.retire(serial)
        queue = self._queues.pop(serial, None)
        self._note_number()
        return [] if queue is None else list(queue.tasks)

    def begin(self) -> None:
        """Count none of the tasks and batches so far: they belong to earlier generations."""
        for queue in self._queues.values():
            queue.num_current = queue.num_ready = 0
        self._room.look_again()

    def push(self, serial: int, task: Task) -> None:
        """Record that a worker gets a task of the current generation."""
        queue = self._queues[serial]
        queue.tasks.append(task)
        queue.num_current += 1

    def pop(self, serial: int, task: Task, *, is_current: bool) -> None:
        """Remove the oldest task of a worker, which has answered it without a batch.

        `serial`: the worker's. `is_current`: the task belongs to the current generation. Raises `ProtocolError` if the
        worker answers another task.
        """
        self._room.note_less(self._pop(serial, task, is_current=is_current))

    def complete(self, serial: int, task: Task, build_s: float | None, *, is_current: bool) -> None:
        """Remove the oldest task of a worker. Its batch is READY now if it is needed.

        `build_s`: how long the worker took; None if it has built no batch. The rest is as in `pop`.
        """
        queue = self._pop(serial, task, is_current=is_current)
        if build_s is not None:  # a failure takes less time than a batch, which would raise the worker's task limit
            queue.note_build(build_s)
            queue.max_tasks = self._task_limit(queue.build_s, queue.deviation_s)
        if is_current:
            queue.num_ready += 1
        self._room.note_less(queue)

    def _pop(self, serial: int, task: Task, *, is_current: bool) -> Queue:
        queue = self._queues.get(serial)
        if queue is None or not queue.tasks or queue.tasks[0] != task:
            raise ProtocolError(f"worker {serial} answered task {task}, but its next task is {self.first(serial)}")
        queue.tasks.popleft()
        if is_current:
            queue.num_current -= 1
        return queue

    @property
    def fastest_build_s(self) -> float:
        """How long the fastest worker takes for a batch; infinite before the first one."""
        return min((queue.build_s for queue in self._queues.values()), default=math.inf)

    def note_ready(self, serial: int, change: int) -> None:
        """Count a READY batch of a worker (1), or one less (-1). The worker may be gone."""
        queue = self._queues.get(serial)
        if queue is not None:
            queue.num_ready += change
            if change < 0:
                self._room.note_less(queue)

    def first(self, serial: int) -> Task | None:
        """Return the oldest task of a worker; None if it has none or is gone."""
        queue = self._queues.get(serial)
        return queue.tasks[0] if queue is not None and queue.tasks else None

    def busy(self) -> list[int]:
        """Return the workers that have tasks of the current generation."""
        return [serial for serial, queue in self._queues.items() if queue.num_current]

    def pick(self, work: Work) -> int | None:
        """Return the worker with the least to do among those that have room and may build this.

        Of equals, it is the one with the lowest id.
        """
        worker_id = None if isinstance(work, PlannedWork) else work.worker_id
        if worker_id is None:
            return self._room.least()
        return self._room.least_of_id(worker_id, self._limits.max_ready_per_worker)

    def pick_for_lost(self, work: Work) -> int | None:
        """Return the same as `pick`, but a worker may have any number of READY batches."""
        worker_id = None if isinstance(work, PlannedWork) else work.worker_id
        return self._room.least_for_lost() if worker_id is None else self._room.least_of_id(worker_id, math.inf)

    @property
    def _share(self) -> int:
        # With more than its share, a worker has a task waiting while another one has none, and the limit is used up.
        num_workers = len(self._queues)
        return self._limits.share(num_workers) if num_workers >= self._limits.num_expected else 1

    def _note_number(self) -> None:
        self._room.use(self._share, self._limits.max_ready_per_worker)

    def _task_limit(self, build_s: float, deviation_s: float) -> int:
        if self._limits.in_order and deviation_s > STEADY_S:
            return 1
        if build_s >= QUEUED_S:  # nearly always
            return min(MIN_TASKS, self._limits.max_tasks)
        num_tasks = 1 + math.ceil(QUEUED_S / build_s) if build_s > 0 else MAX_TASKS
        return min(max(MIN_TASKS, num_tasks), self._limits.max_tasks, MAX_TASKS)

    def __repr__(self) -> str:
        return ", ".join(f"worker {serial}: {len(queue.tasks)}" for serial, queue in self._queues.items()) or "none"
