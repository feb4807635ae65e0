"""Who builds which batch, and which one is delivered next: bookkeeping without I/O, threads or clocks.

A batch is known by (generation, sequence). A generation begins when the loop is sent to a position; sequences count the
batches from there, across the ends of epochs, without end. The states of a batch and what moves it on:

    PLANNED ──assign──► SENT ──complete──► READY ──deliver──► (with the user)
                        ▲ │ a worker takes its tasks in order: the first of them is the one it is building
                        │ ├─ seek: the generation is over; the worker's answer will be thrown away
                        │ └─ remove_worker: it is gone
                        └─ LOST ◄─┘ assigned before any other, to whoever has the least to do

A worker is known by the serial number of its process: a replacement is another worker.

Guarantees: a batch is assigned once per generation, and again only when its worker is gone; it is delivered once; at
most `max_in_flight` are SENT, LOST or READY; a worker with `max_ready_per_worker` batches READY is assigned no new
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
"""Work that a worker should have waiting, so that it doesn't idle while the trainer's thread wakes up."""

MIN_TASKS = 2
"""One being built and one waiting. More would only tie batches to a worker that may turn out slow."""

STEADY_S = 0.01
"""How much the time to build a batch may vary, in order, for a second task to wait at the worker: ten times the time
that a waiting task saves. Behind a slow batch, the task would hold up all later ones, which others have built."""

MAX_TASKS = 64
"""Far fewer messages than a pipe holds, so that sending a task never blocks."""


class Assignment(NamedTuple):
    """A task for a worker."""

    worker: int
    """Its serial number."""
    generation: int
    sequence: int
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How far ahead of the loop the workers may be."""

    max_in_flight: int
    """Batches that are being built or waiting, over all workers."""
    max_ready_per_worker: int
    """Batches of one worker that may wait for the loop; with so many, it gets no further task."""
    max_tasks: int
    """Tasks that may wait in a worker's pipe."""
    in_order: bool
    """False: within an epoch, batches are delivered as they get ready."""

    @property
    def max_of_worker(self) -> int:
        """Batches of one worker that may be built or waiting at a time."""
        return min(self.max_in_flight, self.max_ready_per_worker + self.max_tasks)


@dataclass(slots=True)
class _Worker(Generic[Outcome]):
    max_tasks: int
    """How many tasks of the current generation it should have, by the time that it takes to build a batch."""
    tasks: deque[tuple[int, int]] = field(default_factory=deque)
    """(generation, sequence) sent and not answered, in the order sent."""
    num_current: int = 0
    """How many of them belong to the current generation."""
    num_ready: int = 0
    build_s: float = math.inf
    """Smoothed time to build a batch; infinite until the first is known."""
    deviation_s: float = 0.0
    """Smoothed absolute difference from that."""

    def note_build(self, build_s: float) -> None:
        """Take note of how long a batch took."""
        if math.isinf(self.build_s):
            self.build_s = build_s
        else:
            self.deviation_s += 0.2 * (abs(build_s - self.build_s) - self.deviation_s)
            self.build_s += 0.2 * (build_s - self.build_s)


class Ledger(Generic[Outcome]):
    """The batches in flight. `Outcome` is whatever the engine makes of a worker's answer."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._workers: dict[int, _Worker[Outcome]] = {}
        self._generation = 0
        self._first = (0, 0)
        """(epoch, step) of sequence 0."""
        self._num_first = 0
        """Batches from there to that epoch's end."""
        self._num_later = 0
        """Batches of each later epoch."""
        self._next_sent = 0
        self._num_delivered = 0
        self._lost: list[int] = []
        """Sequences that were sent to workers which are gone; a heap."""
        self._ready: dict[int, tuple[int, Outcome]] = {}
        """sequence -> (worker, outcome), in the order of completion."""

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the batch that is delivered next; in completion order, of the count delivered."""
        return self.locate(self._num_delivered)

    @property
    def num_ready(self) -> int:
        """Batches waiting to be delivered."""
        return len(self._ready)

    @property
    def has_deliverable(self) -> bool:
        """Whether `deliver` would return a batch."""
        return self._next_deliverable() is not None

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last batch of an epoch is the one that was delivered last. Called after each batch: cheap."""
        beyond_first = self._num_delivered - self._num_first
        return beyond_first >= 0 and (not self._num_later or beyond_first % self._num_later == 0)

    @property
    def generation(self) -> int:
        """Of the batches that count."""
        return self._generation

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the (epoch, step) of a batch of the current generation."""
        epoch, step = self._first
        if sequence < self._num_first or not self._num_later:
            return epoch, step + sequence
        num_epochs, step = divmod(sequence - self._num_first, self._num_later)
        return epoch + 1 + num_epochs, step

    def seek(self, epoch: int, step: int, num_batches: Callable[[int], int], *, is_new_plan: bool) -> list[Outcome]:
        """Begin a new generation at a position; return what was ready and is not wanted any more.

        Nothing happens if that is where the current one is, unless the plan is another: what is in flight keeps its
        value.

        Args:
            epoch: Where to begin; the epochs after it have equally many batches each.
            step: Where in the epoch.
            num_batches: How many batches an epoch has.
            is_new_plan: Whether what is in flight belongs to another plan.
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
        """Return whether just the batches before this one have been delivered; a count doesn't tell in any order."""
        is_prefix = self._limits.in_order or not self._num_delivered or step == 0
        return is_prefix and self.position == (epoch, step)

    def add_worker(self, worker: int) -> None:
        """Count on a worker from now on."""
        self._workers[worker] = _Worker(self._task_limit(math.inf, 0.0))

    def assign(self) -> list[Assignment]:
        """Return the tasks to be sent now, in order; they count as sent."""
        assignments: list[Assignment] = []
        if not self._generation:
            return assignments
        # The loop waits for what was lost, and so a worker takes it also if enough batches of its own are ready.
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
        """Take a worker's answer to its oldest task; return False if nobody wants it any more.

        Raises:
            ProtocolError: It answers another task.
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
        """Take a worker's word that it left out its oldest task, which belonged to an earlier generation."""
        worker = self._workers[index]
        if not worker.tasks or worker.tasks[0][0] != generation or generation == self._generation:
            raise ProtocolError(f"worker {index} skipped a task of generation {generation} that it should have done")
        worker.tasks.popleft()

    def deliver(self) -> tuple[int, Outcome] | None:
        """Return the next (sequence, outcome) for the loop, which is out of the ledger then; None if it isn't ready."""
        sequence = self._next_deliverable()
        if sequence is None:
            return None
        index, outcome = self._ready.pop(sequence)
        if index in self._workers:  # else it is gone, and only what it had finished is left of it
            self._workers[index].num_ready -= 1
        self._num_delivered += 1
        return sequence, outcome

    def awaited(self) -> list[int]:
        """Return the workers that the loop waits for: none if nobody has the batch, several in completion order."""
        wanted = (self._generation, self._num_delivered)
        if self._limits.in_order:
            return [index for index, worker in self._workers.items() if wanted in worker.tasks]
        return [index for index, worker in self._workers.items() if worker.num_current]

    def building(self, index: int) -> tuple[int, int] | None:
        """Return the (epoch, step) a worker is at; None if it has nothing to do, or nothing that counts."""
        worker = self._workers.get(index)
        if worker is None or not worker.tasks or worker.tasks[0][0] != self._generation:
            return None
        return self.locate(worker.tasks[0][1])

    def remove_worker(self, index: int) -> int:
        """Forget a worker; return how many batches were lost with it, which others are to build."""
        worker = self._workers.pop(index, None)
        tasks = worker.tasks if worker is not None else ()
        lost = [sequence for generation, sequence in tasks if generation == self._generation]
        for sequence in lost:
            heapq.heappush(self._lost, sequence)
        return len(lost)

    def _pick(self, max_ready: float) -> int | None:
        """Return the worker with the least to do among those with room."""
        # With more than its share a worker would have a task waiting, and another one none: the limit is used up.
        share = max(1, self._limits.max_in_flight // max(1, len(self._workers)))
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
        # Not beyond the epoch's end before all of the epoch is delivered.
        epoch, _ = self.position
        stop = self._num_first + (epoch - self._first[0]) * self._num_later
        return next((sequence for sequence in self._ready if sequence < stop), None)

    def _pop_task(self, index: int, task: tuple[int, int]) -> _Worker[Outcome]:
        worker = self._workers[index]
        if not worker.tasks or worker.tasks[0] != task:
            raise ProtocolError(f"worker {index} answered {task}, but was to do {list(worker.tasks)[:1]}")
        worker.tasks.popleft()
        return worker

    def __repr__(self) -> str:
        tasks = ", ".join(f"worker {index}: {len(worker.tasks)}" for index, worker in self._workers.items())
        lost = f", {len(self._lost)} lost" if self._lost else ""
        return f"<Ledger generation {self._generation}, tasks sent: {tasks or 'none'}, {len(self._ready)} ready{lost}>"
