"""Records which worker builds which batch, and which batch comes next.

(generation, sequence) identifies a batch. A generation begins when the loop is sent to a position; sequences count its
batches in the order of delivery, without end. Generation 0 is the trial batch alone.

A worker does its tasks in order: it is building the first of them. When a new generation begins, the answers to tasks
of earlier ones are dropped.

Guarantees: a batch is assigned once per generation, and again only when its worker is gone. It is delivered once. At
most `max_in_flight` batches are in flight. A worker with `max_ready_per_worker` READY batches gets no new ones. Not
thread-safe.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.batches import BATCH_STATES, Batch, BatchMove, BatchState
from swift_loader.scheduler.lost import LostBatches
from swift_loader.scheduler.queues import Limits, Queues
from swift_loader.scheduler.work import IndexWork, StreamWork, Work, WorkSource

Answer = TypeVar("Answer")


class Ledger(Generic[Answer]):
    """The batches in flight. `Answer` is what a worker answers to a task."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.queues = Queues(limits)
        """The workers' tasks."""
        self._source: WorkSource | None = None
        self._planned: Work | None = None
        """Handed out by the source, but not assigned yet."""
        self.generation = 0
        """The current generation. Answers of earlier ones are dropped."""
        self._batches: dict[int, Batch[Answer]] = {}
        """The batches in flight by sequence, in that order."""
        self._first_sequence = 0
        """None in flight comes before it."""
        self._next_sequence = 0
        self.num_delivered = 0
        """How many batches of the generation were delivered."""
        self._lost = LostBatches()
        self._ready: dict[int, Batch[Answer]] = {}
        """The READY batches by sequence, in the order of completion."""
        self._ready_by_epoch: dict[int, deque[Batch[Answer]]] = {}
        """The same, by epoch; empty if they are delivered in order."""

    # Generations

    def try_out(self, work: Work) -> None:
        """Have the trial batch built, before the first generation."""
        assert not self.generation
        self._planned = work

    def begin(self, source: WorkSource, *, reuses_trial: bool) -> list[Batch[Answer]]:
        """Begin a new generation. Return the READY batches that nobody needs any more.

        `reuses_trial`: the trial batch, if it is READY, is used for the first batch of the same work.
        """
        dropped = self.ready()
        is_first = not self.generation
        self.generation += 1
        self._batches.clear()
        self._ready.clear()
        self._ready_by_epoch.clear()
        self._lost.clear()
        self._source, self._planned = source, None
        self._first_sequence = self._next_sequence = self.num_delivered = 0
        self.queues.begin()
        if is_first and reuses_trial and dropped and self._peek() == dropped[0].work:
            trial = self._batches[0] = dropped.pop()
            self._note_ready(trial)
            self._planned, self._next_sequence = None, 1
            self.queues.note_ready(trial.worker, 1)
        return dropped

    # Workers

    def use_limits(self, limits: Limits) -> None:
        """Work this far ahead from now on, for another number of workers.

        Batches that a sampler chose for one worker may be built by any worker then: theirs may be leaving.
        """
        self._limits = limits
        self.queues.use_limits(limits)
        for batch in self._batches.values():
            batch.work = _unbound(batch.work)
        self._lost.restart(batch for batch in self._batches.values() if batch.state is BatchState.LOST)
        if self._planned is not None:
            self._planned = _unbound(self._planned)

    def remove_worker(self, serial: int) -> int:
        """Remove a worker. Return how many batches were lost with it; other workers will build them."""
        lost = [sequence for generation, sequence in self.queues.remove(serial) if generation == self.generation]
        for sequence in lost:
            batch = self._batches[sequence]
            batch.state = BATCH_STATES[batch.state, BatchMove.LOSE]
            self._lost.add(batch)
        return len(lost)

    # Tasks and answers

    def assign(self) -> Send | None:
        """Return the next task to send now, which counts as sent. None if there is none, or no room for it."""
        if self._lost:
            # The loop waits for the lost batches, so a worker takes one even if it has its maximum of ready batches.
            for sequence in self._lost.firsts():
                batch = self._batches[sequence]
                if (serial := self.queues.pick_for_lost(batch.work)) is not None:
                    self._lost.remove(batch)
                    return self._send(serial, batch)
        if len(self._batches) >= self._limits.max_in_flight or self._peek() is None:
            return None
        if (found := self._find_room()) is None:
            return None
        serial, work = found
        batch = self._batches[self._next_sequence] = Batch(self._next_sequence, work)
        self._next_sequence += 1
        self._planned = None
        return self._send(serial, batch)

    def complete(self, serial: int, generation: int, sequence: int, answer: Answer, build_s: float | None) -> bool:
        """Record a worker's answer to its oldest task. Return False if the batch isn't needed any more.

        `serial`: the worker's. `generation` and `sequence`: the task's. `build_s`: how long the worker took; None if it
        has built no batch. Raises `ProtocolError` if the worker answers another task.
        """
        is_current = generation == self.generation
        self.queues.complete(serial, (generation, sequence), build_s, is_current=is_current)
        if not is_current:
            return False
        batch = self._batches[sequence]
        batch.state = BATCH_STATES[batch.state, BatchMove.COMPLETE]
        batch.answer = answer
        self._note_ready(batch)
        return True

    def end_shard(self, serial: int, generation: int, sequence: int) -> None:
        """Record that a worker's shard of a stream had no batch left for its oldest task.

        Raises `ProtocolError` if the worker answers another task, or one that isn't of a stream.
        """
        is_current = generation == self.generation
        self.queues.pop(serial, (generation, sequence), is_current=is_current)
        if not is_current:
            return
        batch = self._batches[sequence]
        if not isinstance(batch.work, StreamWork) or self._source is None:
            raise ProtocolError(f"worker {serial} told the end of a stream for {batch.work}")
        batch.state = BATCH_STATES[batch.state, BatchMove.END]
        self._source.end_shard(batch.work)
        if isinstance(self._planned, StreamWork) and self._planned.worker_id == batch.work.worker_id:
            self._planned = None
        self._pass_void()

    def skip(self, serial: int, generation: int) -> None:
        """Record that a worker skipped its oldest task, which belonged to an earlier generation.

        Raises `ProtocolError` if the worker had to do it.
        """
        task = self.queues.first(serial)
        if task is None or task[0] != generation or generation == self.generation:
            raise ProtocolError(f"worker {serial} skipped a task of generation {generation}, which it had to do")
        self.queues.pop(serial, task, is_current=False)

    # Delivery

    def next_deliverable(self) -> Batch[Answer] | None:
        """Return the batch that `deliver` would return."""
        if not self._ready:
            return None
        first = self._first()
        assert first is not None, "what is ready is in flight"
        if self._limits.in_order:
            return first if first.state is BatchState.READY else None
        # No batch of a later epoch before all of this epoch are delivered.
        ready = self._ready_by_epoch.get(first.work.epoch)
        return ready[0] if ready else None

    def deliver(self) -> Batch[Answer] | None:
        """Remove and return the next batch for the loop. Return None if it isn't ready."""
        batch = self.next_deliverable()
        if batch is None:
            return None
        del self._batches[batch.sequence], self._ready[batch.sequence]
        if not self._limits.in_order:
            self._ready_by_epoch[batch.work.epoch].popleft()
        batch.state = BATCH_STATES[batch.state, BatchMove.DELIVER]
        self.queues.note_ready(batch.worker, -1)
        self.num_delivered += 1
        self._pass_void()
        return batch

    def ready(self) -> list[Batch[Answer]]:
        """Return the batches that wait to be delivered."""
        return list(self._ready.values())

    @property
    def num_ready(self) -> int:
        """How many batches wait to be delivered."""
        return len(self._ready)

    @property
    def has_room(self) -> bool:
        """Whether fewer batches are in flight than may be."""
        return len(self._batches) < self._limits.max_in_flight

    @property
    def is_exhausted(self) -> bool:
        """Whether the source has no more work, and all batches were delivered."""
        return not self._batches and self._peek() is None

    def head(self) -> Work | None:
        """Return the oldest work that isn't delivered: in order, the next one. None if there is none."""
        first = self._first()
        return self._peek() if first is None else first.work

    # For those who judge workers

    def awaited(self) -> list[int]:
        """Return the workers that the loop waits for: at most one in order, maybe several in completion order.

        If the next batch is LOST, none of those that may build it has room, so it waits for all of them.
        """
        batch = self._first()
        if not self._limits.in_order or (batch is not None and batch.state is BatchState.LOST):
            return self.queues.busy()
        return [batch.worker] if batch is not None and batch.state is BatchState.SENT else []

    def work_of(self, serial: int) -> Work | None:
        """Return what a worker is building; None if it is idle or builds for an old generation."""
        task = self.queues.first(serial)
        return self._batches[task[1]].work if task is not None and task[0] == self.generation else None

    # Inside

    def _peek(self) -> Work | None:
        if self._planned is None and self._source is not None:
            self._planned = self._source.next()
        return self._planned

    def _find_room(self) -> tuple[int, Work] | None:
        """Return the worker that builds the planned work, and the work. None if none has room.

        Out of order, a shard whose worker has no room lets the others pass.
        """
        work = self._planned
        assert work is not None, "the caller has looked"
        serial = self.queues.pick(work)
        if serial is None and not self._limits.in_order and isinstance(work, StreamWork) and self._source is not None:
            full = work.worker_id
            while serial is None:
                self._planned = work = self._source.swap(work)
                if work.worker_id == full:
                    return None
                serial = self.queues.pick(work)
        return None if serial is None else (serial, work)

    def _send(self, serial: int, batch: Batch[Answer]) -> Send:
        self.queues.push(serial, (self.generation, batch.sequence))
        batch.state = BATCH_STATES[batch.state, BatchMove.ASSIGN]
        batch.worker = serial
        return Send(serial, self.generation, batch.sequence, batch.work)

    def _first(self) -> Batch[Answer] | None:
        """Return the oldest batch in flight; None if there is none."""
        # The first item of a dict isn't found in O(1) once many items before it were deleted.
        batches = self._batches
        if not batches:
            return None
        while (batch := batches.get(self._first_sequence)) is None:
            self._first_sequence += 1
        return batch

    def _note_ready(self, batch: Batch[Answer]) -> None:
        self._ready[batch.sequence] = batch
        if self._limits.in_order:
            return
        ready = self._ready_by_epoch.get(batch.work.epoch)
        if ready is None:  # those that are empty are of earlier epochs
            self._ready_by_epoch = {epoch: others for epoch, others in self._ready_by_epoch.items() if others}
            ready = self._ready_by_epoch[batch.work.epoch] = deque()
        ready.append(batch)

    def _pass_void(self) -> None:
        """Pass over the batches at the head that don't exist."""
        while (first := self._first()) is not None and first.state is BatchState.VOID:
            first.state = BATCH_STATES[first.state, BatchMove.PASS]
            del self._batches[first.sequence]

    def __repr__(self) -> str:
        lost = f", {len(self._lost)} lost" if self._lost else ""
        return f"<Ledger generation {self.generation}, tasks sent: {self.queues!r}, {len(self._ready)} ready{lost}>"


def _unbound(work: Work) -> Work:
    return work._replace(worker_id=None) if isinstance(work, IndexWork) else work
