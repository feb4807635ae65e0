"""Records which worker builds which batch, and which batch comes next. No I/O, threads or clocks.

(generation, sequence) identifies a batch. A generation begins when the loop seeks to a position. Sequences count the
batches from there, across epochs, without end. The states of a batch and its transitions:

    PLANNED ──assign──► SENT ──complete──► READY ──deliver──► (with the user)
                        ▲ │ a worker does its tasks in order: it is building the first of them
                        │ ├─ seek: the generation is over; the worker's answer will be dropped
                        │ └─ remove_worker: the worker is gone
                        └─ LOST ◄─┘ assigned before any other batch, to the worker with the least to do

The serial number of its process identifies a worker: a replacement is another worker.

Guarantees: a batch is assigned once per generation, and again only when its worker is gone. It is delivered once. At
most `max_in_flight` batches are SENT, LOST or READY. A worker with `max_ready_per_worker` READY batches gets no new
ones. Not thread-safe: the engine holds its lock around each call.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from swift_loader.errors import ProtocolError

__all__ = ["Assignment", "Ledger", "Limits"]

Outcome = TypeVar("Outcome")

LOOKAHEAD_S = 0.001
"""Work that should wait in a worker's pipe, so that the worker isn't idle while the trainer's thread wakes up."""

MIN_TASKS = 2
"""One that is being built and one that waits. More would bind batches to a worker that may be slow."""

STEADY_S = 0.01
"""How much the time to build a batch may vary, in order, for a second task to wait at the worker: ten times the time
that a waiting task saves. Behind a slow batch, the task would hold up all later ones, which others have built."""

MAX_TASKS = 64
"""Far fewer messages than a pipe holds, so sending a task never blocks."""


class Assignment(NamedTuple):
    """A task for a worker."""

    worker: int
    """The worker's serial number."""
    generation: int
    sequence: int
    epoch: int
    step: int


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

    def max_of_worker(self, num_workers: int) -> int:
        """Return how many batches of one of so many workers may be built or waiting at a time."""
        return min(self.max_in_flight, self.max_ready_per_worker + min(self.max_tasks, self.share(num_workers)))

    def share(self, num_workers: int) -> int:
        """Return how many tasks one of so many workers may have at a time."""
        return max(1, self.max_in_flight // max(1, num_workers))


@dataclass(slots=True)
class _Worker(Generic[Outcome]):
    max_tasks: int
    """How many tasks of the current generation it should have. Depends on `build_s`."""
    tasks: deque[tuple[int, int]] = field(default_factory=deque)
    """(generation, sequence) of tasks that were sent and aren't answered, in the order sent."""
    num_current: int = 0
    """How many of these tasks belong to the current generation."""
    num_ready: int = 0
    build_s: float = math.inf
    """Smoothed time to build a batch. Infinite until the first one is known."""
    deviation_s: float = 0.0
    """Smoothed absolute difference from `build_s`."""

    def note_build(self, build_s: float) -> None:
        """Record how long a batch took."""
        if math.isinf(self.build_s):
            self.build_s = build_s
        else:
            self.deviation_s += 0.2 * (abs(build_s - self.build_s) - self.deviation_s)
            self.build_s += 0.2 * (build_s - self.build_s)


class Ledger(Generic[Outcome]):
    """The batches in flight. `Outcome` is what the engine makes of a worker's answer."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._workers: dict[int, _Worker[Outcome]] = {}
        self._generation = 0
        self._first = (0, 0)
        """(epoch, step) of sequence 0."""
        self._num_first = 0
        """Batches from `_first` to the end of its epoch."""
        self._num_later = 0
        """Batches of each later epoch."""
        self._next_sent = 0
        self._num_delivered = 0
        self._lost: list[int] = []
        """Sequences whose workers are gone; a heap."""
        self._ready: dict[int, tuple[int, Outcome]] = {}
        """sequence -> (worker, outcome), in the order of completion."""

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the next batch. In completion order, it only tells how many batches were delivered."""
        return self.locate(self._num_delivered)

    @property
    def num_ready(self) -> int:
        """Batches that wait to be delivered."""
        return len(self._ready)

    @property
    def has_deliverable(self) -> bool:
        """Whether `deliver` would return a batch."""
        return self._next_deliverable() is not None

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last delivered batch was the last of its epoch. Cheap, because it is called after each batch."""
        beyond_first = self._num_delivered - self._num_first
        return beyond_first >= 0 and (not self._num_later or beyond_first % self._num_later == 0)

    @property
    def generation(self) -> int:
        """The current generation. Batches of earlier ones are dropped."""
        return self._generation

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the (epoch, step) of a batch of the current generation."""
        epoch, step = self._first
        if sequence < self._num_first or not self._num_later:
            return epoch, step + sequence
        num_epochs, step = divmod(sequence - self._num_first, self._num_later)
        return epoch + 1 + num_epochs, step

    def seek(self, epoch: int, step: int, num_batches: Callable[[int], int], *, is_new_plan: bool) -> list[Outcome]:
        """Begin a new generation at a position. Return the ready batches that nobody needs any more.

        Does nothing if the current generation is at this position and the plan is the same. Then the batches in flight
        stay valid.

        Args:
            epoch: The epoch to begin at. All later epochs have the same number of batches.
            step: The step in this epoch.
            num_batches: Returns how many batches an epoch has.
            is_new_plan: Whether the batches in flight belong to another plan.
        """
        stays = self._generation and not is_new_plan and self._is_at(epoch, step)
        num_first, num_later = num_batches(epoch) - step, num_batches(epoch + 1)
        if stays or not num_first + num_later:
            return []
        dropped = [outcome for _, outcome in self._ready.values()]
        self._ready.clear()
        self._lost.clear()
        for worker in self._workers.values():
            worker.num_current = worker.num_ready = 0
        self._generation += 1
        self._first, self._num_first, self._num_later = (epoch, step), num_first, num_later
        self._next_sent = self._num_delivered = 0
        return dropped

    def _is_at(self, epoch: int, step: int) -> bool:
        """Return whether exactly the batches before this one were delivered. Out of order, a count can't tell."""
        is_prefix = self._limits.in_order or not self._num_delivered or step == 0
        return is_prefix and self.position == (epoch, step)

    def add_worker(self, worker: int) -> None:
        """Assign batches to this worker from now on."""
        self._workers[worker] = _Worker(self._task_limit(math.inf, 0.0))

    def assign(self) -> list[Assignment]:
        """Return the tasks to send now, in order. They count as sent."""
        assignments: list[Assignment] = []
        if not self._generation:
            return assignments
        # The loop waits for the lost batches, so a worker takes one even if it has its maximum of ready batches.
        while self._lost and (index := self._pick(math.inf)) is not None:
            assignments.append(self._send(index, heapq.heappop(self._lost)))
        num_new = self._limits.max_in_flight - (self._next_sent - self._num_delivered)
        while num_new > 0 and (index := self._pick(self._limits.max_ready_per_worker)) is not None:
            assignments.append(self._send(index, self._next_sent))
            self._next_sent += 1
            num_new -= 1
        return assignments

    def _send(self, index: int, sequence: int) -> Assignment:
        worker = self._workers[index]
        worker.tasks.append((self._generation, sequence))
        worker.num_current += 1
        return Assignment(index, self._generation, sequence, *self.locate(sequence))

    def complete(self, index: int, generation: int, sequence: int, outcome: Outcome, build_s: float) -> bool:
        """Record a worker's answer to its oldest task. Return False if the batch isn't needed any more.

        Raises:
            ProtocolError: The worker answers another task.
        """
        worker = self._pop_task(index, (generation, sequence))
        worker.note_build(build_s)
        worker.max_tasks = self._task_limit(worker.build_s, worker.deviation_s)
        if generation != self._generation:
            return False
        worker.num_current -= 1
        worker.num_ready += 1
        self._ready[sequence] = (index, outcome)
        return True

    def skip(self, index: int, generation: int) -> None:
        """Record that a worker skipped its oldest task, which belonged to an earlier generation."""
        worker = self._workers[index]
        if not worker.tasks or worker.tasks[0][0] != generation or generation == self._generation:
            raise ProtocolError(f"worker {index} skipped a task of generation {generation}, which it had to do")
        worker.tasks.popleft()

    def deliver(self) -> tuple[int, Outcome] | None:
        """Remove and return the next (sequence, outcome) for the loop. Return None if it isn't ready."""
        sequence = self._next_deliverable()
        if sequence is None:
            return None
        index, outcome = self._ready.pop(sequence)
        if index in self._workers:  # else the worker is gone, but the batches that it finished are still delivered
            self._workers[index].num_ready -= 1
        self._num_delivered += 1
        return sequence, outcome

    def awaited(self) -> list[int]:
        """Return the workers that the loop waits for: at most one in order, maybe several in completion order."""
        wanted = (self._generation, self._num_delivered)
        if self._limits.in_order:
            return [index for index, worker in self._workers.items() if wanted in worker.tasks]
        return [index for index, worker in self._workers.items() if worker.num_current]

    def building(self, index: int) -> tuple[int, int] | None:
        """Return the (epoch, step) that a worker is building; None if it is idle or builds for an old generation."""
        worker = self._workers.get(index)
        if worker is None or not worker.tasks or worker.tasks[0][0] != self._generation:
            return None
        return self.locate(worker.tasks[0][1])

    def remove_worker(self, index: int) -> int:
        """Remove a worker. Return how many batches were lost with it; other workers will build them."""
        worker = self._workers.pop(index, None)
        tasks = worker.tasks if worker is not None else ()
        lost = [sequence for generation, sequence in tasks if generation == self._generation]
        for sequence in lost:
            heapq.heappush(self._lost, sequence)
        return len(lost)

    def _pick(self, max_ready: float) -> int | None:
        """Return the worker with the least to do among those that have room."""
        # With more than its share, a worker has a task waiting while another one has none, and the limit is used up.
        share = self._limits.share(len(self._workers))
        candidates = [
            (len(worker.tasks), worker.num_ready, index)
            for index, worker in self._workers.items()
            if worker.num_ready < max_ready
            and worker.num_current < worker.max_tasks
            and worker.num_current < share
            and len(worker.tasks) < 2 * MAX_TASKS
        ]
        return min(candidates)[2] if candidates else None

    def _task_limit(self, build_s: float, deviation_s: float) -> int:
        if self._limits.in_order and deviation_s > STEADY_S:
            return 1
        lookahead = 1 + math.ceil(LOOKAHEAD_S / build_s) if build_s > 0 else MAX_TASKS
        return min(max(MIN_TASKS, lookahead), self._limits.max_tasks, MAX_TASKS)

    def _next_deliverable(self) -> int | None:
        if not self._ready:
            return None
        if self._limits.in_order:
            return self._num_delivered if self._num_delivered in self._ready else None
        # No batch of a later epoch before all of this epoch are delivered.
        epoch, _ = self.position
        stop = self._num_first + (epoch - self._first[0]) * self._num_later
        return next((sequence for sequence in self._ready if sequence < stop), None)

    def _pop_task(self, index: int, task: tuple[int, int]) -> _Worker[Outcome]:
        worker = self._workers[index]
        if not worker.tasks or worker.tasks[0] != task:
            raise ProtocolError(f"worker {index} answered task {task}, but its next task is {list(worker.tasks)[:1]}")
        worker.tasks.popleft()
        return worker

    def __repr__(self) -> str:
        tasks = ", ".join(f"worker {index}: {len(worker.tasks)}" for index, worker in self._workers.items())
        lost = f", {len(self._lost)} lost" if self._lost else ""
        return f"<Ledger generation {self._generation}, tasks sent: {tasks or 'none'}, {len(self._ready)} ready{lost}>"
