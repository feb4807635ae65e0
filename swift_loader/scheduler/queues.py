"""Which tasks each worker has, which workers have room for more, and how far ahead of the loop they may work.

A batch is in flight from when a worker is to build it until the loop takes it. In completion order, two per worker keep
all of them busy: one to build, and one that waits for the worker or for the loop.

In order, the loop can't take the batches after a slow one, and the other workers continue only up to the limit. With
three per worker, they hardly ever reach it. The table gives the share of the rate in completion order. Batches have 32
samples, and one sample in twenty takes 50 times as long as the rest (in virtual time, `benchmarks/scheduler.py`):

    per worker       2      3      4      6
    8 workers     0.97   1.00   1.00   1.00
    16 workers    0.94   1.00   1.00   1.00
    64 workers    0.87   0.98   0.99   0.99

Each batch more per worker costs the memory of one batch per worker, also where nothing varies.

A worker does its tasks in order, so it is building the first of them, and each answer is about that one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from swift_loader.errors import ProtocolError
from swift_loader.sampling.work import PlannedWork, Work

MIN_IN_FLIGHT = 10
"""For few workers, so that a loop that pauses now and then finds batches ready."""

PER_WORKER = 2
PER_WORKER_IN_ORDER = 3

QUEUED_S = 0.001
"""Work that should wait in a worker's pipe, so that the worker isn't idle while the trainer's thread wakes up."""

MIN_TASKS = 2
"""One that is being built and one that waits. More would bind batches to a worker that may be slow."""

MAX_TASKS = 64
"""Of one worker and the current generation."""

MAX_HELD = 96
"""Tasks that a worker may have, with those of earlier generations."""

STEADY_S = 0.01
"""How much the time to build a batch may vary, in order, for a second task to wait at the worker: ten times the time
that a waiting task saves. Behind a slow batch, the task would hold up all later ones, which others have built."""

MIN_ENTRIES = 64
"""Old entries of the heap are removed when there are so many more than twice the workers, which is O(1) per entry."""

Task = tuple[int, int]
"""(generation, sequence)."""

Load = tuple[int, int, int, int]
"""(tasks, READY batches, worker id, serial number). Of several workers, the one with the least gets the next task."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far ahead of the loop the workers may work."""

    max_in_flight: int
    """Batches of all workers that are being built or wait for the loop."""
    max_ready_per_worker: int
    """Batches of one worker that may wait for the loop. At this number, the worker gets no new task."""
    in_order: bool
    """False delivers batches as soon as they are ready, within an epoch."""
    num_expected: int = 0
    """Until so many workers are there, each has at most one task. Datasets may wait for each other in all of them."""

    @classmethod
    def of(cls, max_in_flight: int | None, max_ready: int | None, num_workers: int, *, in_order: bool) -> Limits:
        """Return the limits of one loader. What is None is chosen by the number of workers."""
        num_batches = max_in_flight or chosen_in_flight(num_workers, in_order=in_order)
        # A worker's share and one more, because some are slower than others.
        return cls(num_batches, max_ready or max(2, num_batches // max(1, num_workers) + 1), in_order)

    def max_of_worker(self, num_workers: int) -> int:
        """Return how many batches of one of so many workers may be built or waiting at a time."""
        return min(self.max_in_flight, self.max_ready_per_worker + min(MAX_TASKS, self.share(num_workers)))

    def share(self, num_workers: int) -> int:
        """Return how many tasks one of so many workers may have at a time."""
        return max(1, self.max_in_flight // max(1, num_workers))


def chosen_in_flight(num_workers: int, *, in_order: bool) -> int:
    """Return how many batches may be in flight if the user doesn't say."""
    return max(MIN_IN_FLIGHT, (PER_WORKER_IN_ORDER if in_order else PER_WORKER) * num_workers)


@dataclass(slots=True)
class Queue:
    """The tasks of a worker."""

    serial: int
    worker_id: int
    max_tasks: int
    """How many tasks of the current generation it should have. Depends on `build_s`."""
    tasks: deque[Task] = field(default_factory=deque)
    """Tasks that were sent and aren't answered, in the order sent."""
    num_current: int = 0
    """How many of these tasks belong to the current generation."""
    num_ready: int = 0
    build_s: float = math.inf
    """Smoothed time to build a batch. Infinite until the first one is known."""
    deviation_s: float = 0.0
    """Smoothed absolute difference from `build_s`."""
    is_open: bool = False
    """Whether the worker gets tasks."""
    entry: Load | None = None
    """Under which load the heap finds the worker. None: not at all."""


class Queues:
    """The tasks of all workers, and the open workers in a heap, by load.

    The time to find the worker with the least to do hardly depends on the number of workers, under these rules. For
    batches that were lost, which are rare, each worker is looked at.

    - A worker that gets more to do keeps its entry. `_least` corrects the entry when it is the first one.
    - A worker that gets less to do gets another entry. `_least` removes the old one when it is the first one.
    - A worker without room loses its entry when that is the first one. It gets another when it has room again.

    So no entry of a worker with room is beyond its load, and the first one that is right belongs to the least load.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queues: dict[int, Queue] = {}
        """By the worker's serial number."""
        self._by_id: dict[int, list[Queue]] = {}
        """The open workers with each id. One, apart from short times."""
        self._entries: list[Load] = []
        """A heap."""
        self._share = 1
        """How many tasks of the current generation a worker may have. With more, it would have a task waiting while
        another one has none, and the limit is used up."""
        self._note_number()

    # Workers

    def use_limits(self, limits: Limits) -> None:
        """Hold to these limits from now on."""
        self._limits = limits
        self._note_number()
        self._look_again()

    def add(self, serial: int, worker_id: int) -> None:
        """Give tasks to this worker from now on."""
        self._queues[serial] = Queue(serial, worker_id, self._task_limit(math.inf, 0.0))
        self.reopen(serial)
        self._note_number()

    def reopen(self, serial: int) -> None:
        """Give tasks to a worker that was retired. Idempotent."""
        queue = self._queues[serial]
        if not queue.is_open:
            queue.is_open = True
            self._by_id.setdefault(queue.worker_id, []).append(queue)
            self._note_less(queue)

    def retire(self, serial: int) -> None:
        """Give this worker, which may be unknown, no more tasks. It may still answer those that it has. Idempotent."""
        queue = self._queues.get(serial)
        if queue is None or not queue.is_open:
            return
        queue.is_open, queue.entry = False, None
        namesakes = self._by_id[queue.worker_id]
        namesakes.remove(queue)
        if not namesakes:
            del self._by_id[queue.worker_id]

    def remove(self, serial: int) -> list[Task]:
        """Forget a worker, which may be unknown. Return its tasks."""
        self.retire(serial)
        queue = self._queues.pop(serial, None)
        self._note_number()
        return [] if queue is None else list(queue.tasks)

    def _note_number(self) -> None:
        """Share out the tasks again: there is another number of workers, or there are other limits."""
        before, num_workers = self._share, len(self._queues)
        self._share = self._limits.share(num_workers) if num_workers >= self._limits.num_expected else 1
        if self._share > before:
            self._look_again()

    # Tasks

    def begin(self) -> None:
        """Count none of the tasks and batches so far: they belong to earlier generations."""
        for queue in self._queues.values():
            queue.num_current = queue.num_ready = 0
        self._look_again()

    def push(self, serial: int, task: Task) -> None:
        """Record that a worker gets a task of the current generation."""
        queue = self._queues[serial]
        queue.tasks.append(task)
        queue.num_current += 1

    def pop(
        self, serial: int, task: Task, *, is_current: bool, is_ready: bool = False, build_s: float | None = None
    ) -> None:
        """Remove the oldest task of a worker, which has answered it.

        `serial`: the worker's. `is_current`: the task belongs to the current generation. `is_ready`: there is a batch,
        which is READY now. `build_s`: how long the worker took for it; None if it has built none. Raises
        `ProtocolError` if the worker answers another task.
        """
        queue = self._queues.get(serial)
        if queue is None or not queue.tasks or queue.tasks[0] != task:
            raise ProtocolError(f"worker {serial} answered task {task}, but its next task is {self.first(serial)}")
        queue.tasks.popleft()
        if build_s is not None:  # a failure takes less time than a batch, which would raise the worker's task limit
            if math.isinf(queue.build_s):
                queue.build_s = build_s
            else:
                queue.deviation_s += 0.2 * (abs(build_s - queue.build_s) - queue.deviation_s)
                queue.build_s += 0.2 * (build_s - queue.build_s)
            queue.max_tasks = self._task_limit(queue.build_s, queue.deviation_s)
        if is_current:
            queue.num_current -= 1
            queue.num_ready += is_ready
        self._note_less(queue)

    def note_delivered(self, serial: int) -> None:
        """Count one READY batch of a worker less. The worker may be gone."""
        queue = self._queues.get(serial)
        if queue is not None:
            queue.num_ready -= 1
            self._note_less(queue)

    def first(self, serial: int) -> Task | None:
        """Return the oldest task of a worker; None if it has none or is gone."""
        queue = self._queues.get(serial)
        return queue.tasks[0] if queue is not None and queue.tasks else None

    def busy(self) -> list[int]:
        """Return the workers that have tasks of the current generation."""
        return [serial for serial, queue in self._queues.items() if queue.num_current]

    @property
    def fastest_build_s(self) -> float:
        """How long the fastest worker takes for a batch; infinite before the first one."""
        return min((queue.build_s for queue in self._queues.values()), default=math.inf)

    def _task_limit(self, build_s: float, deviation_s: float) -> int:
        if self._limits.in_order and deviation_s > STEADY_S:
            return 1
        if build_s >= QUEUED_S:  # nearly always
            return MIN_TASKS
        return min(1 + math.ceil(QUEUED_S / build_s), MAX_TASKS) if build_s > 0 else MAX_TASKS

    # The worker with the least to do

    def pick(self, work: Work, *, is_lost: bool = False) -> int | None:
        """Return the worker with the least to do among those that have room and may build this. None: there is none.

        Of equals, it is the one with the lowest id. If the batch is lost, a worker may have any number of READY ones.
        """
        worker_id = None if isinstance(work, PlannedWork) else work.worker_id
        if worker_id is None and not is_lost:
            return self._least()
        max_ready = math.inf if is_lost else self._limits.max_ready_per_worker
        loads = [
            (len(queue.tasks), queue.num_ready, queue.worker_id, queue.serial)
            for queue in (self._queues.values() if worker_id is None else self._by_id.get(worker_id, ()))
            if queue.is_open
            and queue.num_ready < max_ready
            # What only this worker may build may as well wait there.
            and queue.num_current < min(queue.max_tasks if worker_id is None else MAX_TASKS, self._share)
            and len(queue.tasks) < MAX_HELD
        ]
        return min(loads)[3] if loads else None

    def _least(self) -> int | None:
        """Return the worker with the least to do; None if none has room."""
        entries = self._entries
        while entries:
            entry = entries[0]
            queue = self._queues.get(entry[3])
            if queue is None or queue.entry is not entry:
                heappop(entries)
                continue
            num_tasks, num_ready, num_current = len(queue.tasks), queue.num_ready, queue.num_current
            has_room = num_current < queue.max_tasks and num_current < self._share and num_tasks < MAX_HELD
            if not has_room or num_ready >= self._limits.max_ready_per_worker:
                heappop(entries)
                queue.entry = None
            elif num_tasks == entry[0] and num_ready == entry[1]:
                return entry[3]
            else:
                queue.entry = num_tasks, num_ready, queue.worker_id, queue.serial
                heapreplace(entries, queue.entry)
        return None

    def _note_less(self, queue: Queue) -> None:
        """Record that a worker, which may be retired, has less to do than before. For each batch, so it is quick."""
        num_tasks, num_current, num_ready = len(queue.tasks), queue.num_current, queue.num_ready
        if num_current >= queue.max_tasks or num_current >= self._share or num_tasks >= MAX_HELD or not queue.is_open:
            return
        if num_ready >= self._limits.max_ready_per_worker:
            return
        load = num_tasks, num_ready, queue.worker_id, queue.serial
        if queue.entry is None or load < queue.entry:
            queue.entry = load
            heappush(self._entries, load)
            if len(self._entries) > 2 * len(self._queues) + MIN_ENTRIES:
                self._look_again()

    def _look_again(self) -> None:
        """Look at each worker: many may have less to do than before. O(workers)."""
        self._entries.clear()
        for queue in self._queues.values():
            queue.entry = None
            self._note_less(queue)

    def __repr__(self) -> str:
        return ", ".join(f"worker {serial}: {len(queue.tasks)}" for serial, queue in self._queues.items()) or "none"
