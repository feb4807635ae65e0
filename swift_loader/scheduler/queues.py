"""The workers: their states and tasks, which of them have room for more, and how far ahead of the loop they may work.

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

A worker does its tasks in order, so it is building the first of them, and each answer is about that one. Its states:

    STARTING ──ready──► READY ──kill──► KILLED
       │                  │               │
       └───disconnect─────┴──disconnect───┴──abandon──► REAPED ──end──► GONE

    READY ◄──leave, stay──► LEAVING ──dismiss──► DISMISSED ──disconnect──► PARTING ──end──► GONE

A worker that leaves finishes its tasks first. Until it is dismissed, it may also be killed or disconnect, as a READY
one. Only `WORKER_STATES` moves a worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

from swift_loader.errors import ProtocolError
from swift_loader.sampling.work import PlannedWork, Work
from swift_loader.scheduler.delivery import BatchState, Delivery
from swift_loader.scheduler.messages import Send, Stall

MIN_IN_FLIGHT = 10
"""For few workers, so that a loop that pauses now and then finds batches ready."""

PER_WORKER = 2
PER_WORKER_IN_ORDER = 3

QUEUED_S = 0.001
"""Work that should wait in a worker's pipe, so that the worker isn't idle while the trainer's thread wakes up."""

USUAL_TASKS = 2
"""One that is being built and one that waits. More would bind batches to a worker that may be slow."""

MAX_TASKS = 64
"""Of one worker and the current generation."""

MAX_HELD = 96
"""Tasks that a worker may have, with those of earlier generations."""

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
    in_order: bool
    """False delivers batches as soon as they are ready, within an epoch."""
    num_expected: int = 0
    """Until so many workers are there, each has at most one task. Datasets may wait for each other in all of them."""

    @classmethod
    def of(
        cls, max_in_flight: int | None, max_ready: int | None, num_workers: int, *, in_order: bool, num_ahead: int = 0
    ) -> Limits:
        """Return the limits of one loader. What is None is chosen by the number of workers.

        `num_ahead`: how many tasks each of them should have, to read ahead.
        """
        usual = default_in_flight(num_workers, in_order=in_order)
        num_batches = max_in_flight or max(usual, num_workers * min(num_ahead + 3, MAX_TASKS) if num_ahead else 0)
        # A worker's share and one more, because some are slower than others.
        return cls(num_batches, max_ready or max(2, num_batches // max(1, num_workers) + 1), in_order)

    def max_of_worker(self, num_workers: int) -> int:
        """Return how many batches of one of so many workers may be built or waiting at a time."""
        return min(self.max_in_flight, self.max_ready_per_worker + min(MAX_TASKS, self.share(num_workers)))

    def share(self, num_workers: int) -> int:
        """Return how many tasks one of so many workers may have at a time."""
        return max(1, self.max_in_flight // max(1, num_workers))


def default_in_flight(num_workers: int, *, in_order: bool) -> int:
    """Return how many batches may be in flight if the user doesn't say."""
    return max(MIN_IN_FLIGHT, (PER_WORKER_IN_ORDER if in_order else PER_WORKER) * num_workers)


class WorkerState(str, Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    """Its process may exist. It gets no task yet."""
    READY = "ready"
    """It gets tasks, and does them in the order in which they were sent."""
    KILLED = "killed"
    """It hung and was killed. It gets no more tasks, but answers may still arrive."""
    LEAVING = "leaving"
    """It isn't wanted any more. It finishes the tasks that it has, and gets no others."""
    DISMISSED = "dismissed"
    """It has finished them, and is to end."""
    PARTING = "parting"
    """The executor finds out how it ended after it was dismissed. That isn't a death."""
    REAPED = "reaped"
    """The executor finds out how it ended. Until then its batches aren't given to others."""
    GONE = "gone"


class WorkerMove(str, Enum):
    """What moves a worker to another state."""

    READY = "ready"
    KILL = "kill"
    DISCONNECT = "disconnect"
    ABANDON = "abandon"
    """SIGKILL didn't end it in time."""
    LEAVE = "leave"
    STAY = "stay"
    DISMISS = "dismiss"
    END = "end"


WORKER_STATES: dict[tuple[WorkerState, WorkerMove], WorkerState] = {
    (WorkerState.STARTING, WorkerMove.READY): WorkerState.READY,
    (WorkerState.READY, WorkerMove.KILL): WorkerState.KILLED,
    (WorkerState.STARTING, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.READY, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.KILLED, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.KILLED, WorkerMove.ABANDON): WorkerState.REAPED,
    # The stream of an abandoned worker may end before the executor stops listening to it.
    (WorkerState.REAPED, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.REAPED, WorkerMove.END): WorkerState.GONE,
    (WorkerState.READY, WorkerMove.LEAVE): WorkerState.LEAVING,
    (WorkerState.LEAVING, WorkerMove.STAY): WorkerState.READY,
    (WorkerState.LEAVING, WorkerMove.KILL): WorkerState.KILLED,
    (WorkerState.LEAVING, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.LEAVING, WorkerMove.DISMISS): WorkerState.DISMISSED,
    (WorkerState.DISMISSED, WorkerMove.DISCONNECT): WorkerState.PARTING,
    # Two threads may see the end of a stream, if one takes over from the other at this moment.
    (WorkerState.PARTING, WorkerMove.DISCONNECT): WorkerState.PARTING,
    (WorkerState.PARTING, WorkerMove.END): WorkerState.GONE,
}


@dataclass(slots=True, eq=False)
class Worker:
    """What the scheduler knows about a worker."""

    serial: int
    """Unique among all workers. A replacement is another worker."""
    worker_id: int
    """Which of the n workers it is, from 0. Its replacement has the same id."""
    state: WorkerState = WorkerState.STARTING
    tasks: deque[Send] = field(default_factory=deque)
    """Sent and not answered, in the order sent. It is doing the first of them."""
    num_current: int = 0
    """How many of these tasks belong to the current generation."""
    num_ready: int = 0
    """How many of its batches are READY."""
    max_tasks: int = USUAL_TASKS
    """How many tasks of the current generation it should have. Depends on `build_s`."""
    build_s: float = math.inf
    """Smoothed time to build a batch. Infinite until the first one is known."""
    deviation_s: float = 0.0
    """Smoothed absolute difference from `build_s`."""
    reads_ahead: bool = False
    """Whether it reads for the tasks that it has."""
    since_s: float = 0.0
    """When it was killed, or else got to its oldest task, if it has one."""
    stall: Stall | None = None
    """Why it was killed."""
    work: Work | None = None
    """What it was building when it disconnected."""

    def move(self, move: WorkerMove) -> None:
        """Go to the next state. Raises `ProtocolError` if there is no such move from this state."""
        state = WORKER_STATES.get((self.state, move))
        if state is None:
            raise ProtocolError(f"worker {self.serial} is {self.state.value}, which {move.value} can't follow")
        self.state = state

    def has_room(self, max_tasks: int, share: int, max_ready: float) -> bool:
        """Return whether it takes one more task. `max_tasks` and `share`: of the current generation."""
        num_current, is_ready = self.num_current, self.state is WorkerState.READY
        has_few = num_current < max_tasks and num_current < share and len(self.tasks) < MAX_HELD
        return is_ready and has_few and self.num_ready < max_ready

    def push(self, task: Send) -> None:
        """Record that it gets a task of the current generation."""
        if not self.tasks:
            self.since_s = task.sent_s
        self.tasks.append(task)
        self.num_current += 1

    def note_build(self, build_s: float, *, in_order: bool) -> None:
        """Record how long it took to build a batch."""
        if math.isinf(self.build_s):
            self.build_s = build_s
        else:
            self.deviation_s += 0.2 * (abs(build_s - self.build_s) - self.deviation_s)
            self.build_s += 0.2 * (build_s - self.build_s)
        if self.reads_ahead:
            self.max_tasks = MAX_TASKS
        elif in_order and self.deviation_s > STEADY_S:
            self.max_tasks = 1
        elif self.build_s >= QUEUED_S:  # nearly always
            self.max_tasks = USUAL_TASKS
        else:
            self.max_tasks = min(1 + math.ceil(QUEUED_S / self.build_s), MAX_TASKS) if self.build_s > 0 else MAX_TASKS


Load = tuple[int, int, int, int]


def load_of(worker: Worker) -> Load:
    """Return how much a worker has to do. Of several workers, the one with the least gets the next task."""
    return len(worker.tasks), worker.num_ready, worker.worker_id, worker.serial


class Workers:
    """All workers but those that are GONE, and their loads in a heap.

    The time to find the worker with the least to do hardly depends on the number of workers. Each one that has room has
    its load, or one that it had before and that is less, in the heap. What isn't right any more is removed or corrected
    once it is the first entry. For batches that were lost, which are rare, and those that only one worker may build,
    each worker is looked at.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """`use_limits` replaces them."""
        self.by_serial: dict[int, Worker] = {}
        """By serial number. A worker is known from its first event on."""
        self._heap: list[Load] = []
        self._entries: set[Load] = set()
        """The same, so that none is there twice."""
        self._share = 1
        """How many tasks of the current generation a worker may have. With more, it would have a task waiting while
        another one has none, and the limit is used up."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.by_serial.values())

    def use_limits(self, limits: Limits) -> None:
        """Hold to these limits from now on."""
        self.limits = limits
        self._share_out()

    def meet(self, serial: int, worker_id: int) -> Worker:
        """Return the record of a worker. Its first event makes it."""
        worker = self.by_serial.setdefault(serial, Worker(serial, worker_id))
        self._share_out()
        return worker

    def remove(self, worker: Worker) -> None:
        """Forget a worker. Idempotent."""
        self.by_serial.pop(worker.serial, None)
        self._share_out()

    def _share_out(self) -> None:
        """Look at each worker: there are others, or other limits, or all may have less to do than before."""
        num_workers = len(self.by_serial)
        self._share = self.limits.share(num_workers) if num_workers >= self.limits.num_expected else 1
        self._heap = sorted(map(load_of, self))
        self._entries = set(self._heap)

    def _note_load(self, worker: Worker) -> None:
        """Have the worker in the heap under its load, unless it has no room anyway."""
        load = len(worker.tasks), worker.num_ready, worker.worker_id, worker.serial
        if worker.num_current < worker.max_tasks and load not in self._entries:
            self._entries.add(load)
            heappush(self._heap, load)

    def begin(self) -> None:
        """Count none of the tasks and batches so far: they belong to earlier generations."""
        for worker in self:
            worker.num_current = worker.num_ready = 0
        self._share_out()

    def pop(self, worker: Worker, batch: Delivery | None, build_s: float | None, now_s: float) -> None:
        """Remove the oldest task of a worker, which has answered it.

        `batch`: the task's; None if it belongs to an earlier generation. `build_s`: how long the worker took for a
        batch; None if it has built none.
        """
        worker.tasks.popleft()
        worker.since_s = now_s
        if batch is not None:
            worker.num_current -= 1
            worker.num_ready += batch.state is BatchState.READY
        if build_s is not None:  # a failure takes less time than a batch, which would raise the worker's task limit
            worker.note_build(build_s, in_order=self.limits.in_order)
        self._note_load(worker)

    def note_delivered(self, serial: int) -> None:
        """Count one READY batch of a worker less. The worker may be gone."""
        worker = self.by_serial.get(serial)
        if worker is not None:
            worker.num_ready -= 1
            self._note_load(worker)

    def busy(self) -> list[Worker]:
        """Return the workers that have tasks of the current generation."""
        return [worker for worker in self if worker.num_current]

    @property
    def fastest_build_s(self) -> float:
        """How long the fastest worker takes for a batch; infinite before the first one."""
        return min((worker.build_s for worker in self), default=math.inf)

    def pick(self, work: Work, *, is_lost: bool = False) -> Worker | None:
        """Return the worker with the least to do among those that have room and may build this. None: there is none.

        Of equals, it is the one with the lowest id. If the batch is lost, a worker may have any number of READY ones.
        """
        worker_id = None if isinstance(work, PlannedWork) else work.worker_id
        max_ready = math.inf if is_lost else self.limits.max_ready_per_worker
        if worker_id is not None:
            for one in self.by_serial.values():  # what only this one may build may as well wait there
                if one.worker_id == worker_id and one.has_room(MAX_TASKS, self._share, max_ready):
                    return one
            return None
        if is_lost:
            free = (worker for worker in self if worker.has_room(worker.max_tasks, self._share, max_ready))
            return min(free, key=load_of, default=None)
        while self._heap:
            num_tasks, num_ready, _, serial = self._heap[0]
            worker = self.by_serial.get(serial)
            if worker is not None and worker.has_room(worker.max_tasks, self._share, max_ready):
                if num_tasks == len(worker.tasks) and num_ready == worker.num_ready:
                    return worker
                self._note_load(worker)  # it has more to do, in truth
            self._entries.discard(heappop(self._heap))
        return None

    def __repr__(self) -> str:
        return ", ".join(f"worker {worker.serial}: {len(worker.tasks)}" for worker in self) or "none"
