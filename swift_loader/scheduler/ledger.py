"""Records which worker builds which batch, and which batch comes next.

(generation, sequence) identifies a batch. A generation begins when the loop is sent to a position; sequences count its
batches in the order of delivery, without end.

A worker does its tasks in order: it is building the first of them. When a new generation begins, the answers to tasks
of earlier ones are dropped.

Guarantees: a batch is assigned once per generation, and again only when its worker is gone. It is delivered once. At
most `max_in_flight` batches are in flight. A worker with `max_ready_per_worker` READY batches gets no new ones. Not
thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from swift_loader.errors import ProtocolError
from swift_loader.sampling.work import IndexWork, PlannedWork, StreamWork, Work, WorkSource
from swift_loader.scheduler.delivery import BatchState, Delivery
from swift_loader.scheduler.messages import Answered, SampleFailed, Send, Skipped, StreamEnded
from swift_loader.scheduler.queues import Limits, Queues


class Ledger:
    """The batches in flight."""

    def __init__(self, limits: Limits, generation: int = 0) -> None:
        """Begin with nothing in flight. `generation`: the last one so far."""
        self._limits = limits
        self.queues = Queues(limits)
        """The workers' tasks."""
        self.source: WorkSource | None = None
        """What hands out the work of the current generation."""
        self._planned: Work | None = None
        """Handed out by the source, but not assigned yet."""
        self.generation = generation
        """The current generation. Answers of earlier ones are dropped."""
        self._batches: dict[int, Delivery] = {}
        """The batches in flight by sequence, in that order."""
        self._first_sequence = 0
        """None in flight comes before it."""
        self._next_sequence = 0
        self.num_delivered = 0
        """How many batches of the generation were delivered."""
        self._lost: dict[int | None, list[int]] = {}
        """Heaps of the sequences of LOST batches, none of them empty, by the worker id that must build them; None: any
        worker may. As long as no worker has room for the first of a heap, none has room for the others."""
        self.ready: dict[int, Delivery] = {}
        """The READY batches by sequence, in the order of completion."""
        self._ready_by_epoch: dict[int, deque[Delivery]] = {}
        """The same, by epoch; empty if they are delivered in order."""

    # Generations

    def begin(self, source: WorkSource) -> list[Delivery]:
        """Begin a new generation. Return the batches in flight, which nobody needs any more."""
        dropped = self.in_flight()
        self.generation += 1
        self._batches, self.ready, self._ready_by_epoch, self._lost = {}, {}, {}, {}
        self.source, self._planned = source, None
        self._first_sequence = self._next_sequence = self.num_delivered = 0
        self.queues.begin()
        return dropped

    def in_flight(self) -> list[Delivery]:
        """Return the batches that workers have, or that wait to be delivered."""
        return list(self._batches.values())

    # Workers

    def use_limits(self, limits: Limits) -> None:
        """Work this far ahead from now on, for another number of workers.

        Batches that a sampler chose for one worker may be built by any worker then: theirs may be leaving.
        """
        self._limits = limits
        self.queues.use_limits(limits)
        for batch in self._batches.values():
            if isinstance(batch.work, IndexWork):
                batch.work = batch.work._replace(worker_id=None)
        if isinstance(self._planned, IndexWork):
            self._planned = self._planned._replace(worker_id=None)
        lost = [sequence for sequences in self._lost.values() for sequence in sequences]
        self._lost = {}
        self._note_lost(lost)

    def remove_worker(self, serial: int) -> int:
        """Remove a worker. Return how many batches were lost with it; other workers will build them."""
        tasks = self.queues.remove(serial)
        lost = [one for generation, one in tasks if generation == self.generation and one in self._batches]
        for sequence in lost:
            batch = self._batches[sequence]
            batch.state, batch.failures = BatchState.LOST, ()
        self._note_lost(lost)
        return len(lost)

    def _note_lost(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            work = self._batches[sequence].work
            worker_id = None if isinstance(work, PlannedWork) or work is None else work.worker_id
            heappush(self._lost.setdefault(worker_id, []), sequence)

    # Tasks and answers

    def assign(self, sends: list[Send]) -> None:
        """Add the tasks to send now, which count as sent: as many as there is room for.

        Raises what the source of work raised.
        """
        while self._lost and (send := self._assign_lost()) is not None:
            sends.append(send)
        source, batches, pick = self.source, self._batches, self.queues.pick
        while len(batches) < self._limits.max_in_flight and source is not None:
            self._planned = work = self._planned or source.next()
            if work is None:
                return
            serial = pick(work)
            if serial is None and isinstance(work, StreamWork) and not self._limits.in_order:
                full = work.worker_id
                while serial is None:  # out of order, a shard whose worker has no room lets the others pass
                    self._planned = work = source.swap(work)
                    if work.worker_id == full:
                        return
                    serial = pick(work)
            if serial is None:
                return
            batch = batches[self._next_sequence] = Delivery(work, self._next_sequence)
            self._next_sequence += 1
            self._planned = None
            sends.append(self._send(serial, batch, work))

    def _assign_lost(self) -> Send | None:
        """Send a lost batch again: the loop waits for it. O(worker ids)."""
        for sequence, worker_id in sorted((sequences[0], worker_id) for worker_id, sequences in self._lost.items()):
            batch = self._batches[sequence]
            assert batch.work is not None
            if (serial := self.queues.pick(batch.work, is_lost=True)) is not None:
                heappop(self._lost[worker_id])
                if not self._lost[worker_id]:
                    del self._lost[worker_id]
                return self._send(serial, batch, batch.work)
        return None

    def _send(self, serial: int, batch: Delivery, work: Work) -> Send:
        self.queues.push(serial, (self.generation, batch.sequence))
        batch.state, batch.worker = BatchState.SENT, serial
        return Send(serial, self.generation, batch.sequence, work)

    def complete(self, answer: Answered) -> Delivery | None:
        """Record the answer to a worker's oldest task. Return the batch, which is READY; None if nobody needs it.

        Raises `ProtocolError` if the worker answers another task.
        """
        generation, sequence = answer.generation, answer.sequence
        is_current = generation == self.generation
        task = generation, sequence
        batch = self._batches.get(sequence) if is_current else None
        self.queues.pop(answer.worker, task, is_current=is_current, is_ready=batch is not None, build_s=answer.build_s)
        if batch is None:
            return None
        batch.batch, batch.error, batch.lease = answer.batch, answer.error, answer.lease
        batch.snapshot, batch.arrival, batch.build_s = answer.snapshot, answer.arrival, answer.build_s
        batch.state = BatchState.READY
        self.ready[sequence] = batch
        if not self._limits.in_order and batch.work is not None:
            ready = self._ready_by_epoch.get(batch.work.epoch)
            if ready is None:  # those that are empty are of earlier epochs
                self._ready_by_epoch = {epoch: others for epoch, others in self._ready_by_epoch.items() if others}
                ready = self._ready_by_epoch[batch.work.epoch] = deque()
            ready.append(batch)
        return batch

    def note_failure(self, failed: SampleFailed) -> None:
        """Record the failure of a sample, if its batch is needed. What a worker reports ends with the worker."""
        batch = self._batches.get(failed.sequence) if failed.generation == self.generation else None
        if batch is not None and batch.state is BatchState.SENT and batch.worker == failed.worker:
            batch.failures += (failed.failure,)

    def end_shard(self, ended: StreamEnded) -> None:
        """Record that a worker's shard of a stream had no batch left for its oldest task.

        Raises `ProtocolError` if the worker answers another task, or one that isn't of a stream.
        """
        is_current = ended.generation == self.generation
        self.queues.pop(ended.worker, (ended.generation, ended.sequence), is_current=is_current)
        if not is_current:
            return
        batch = self._batches[ended.sequence]
        if not isinstance(batch.work, StreamWork) or self.source is None:
            raise ProtocolError(f"worker {ended.worker} told the end of a stream for {batch.work}")
        batch.state = BatchState.VOID
        self.source.end_shard(batch.work)
        if isinstance(self._planned, StreamWork) and self._planned.worker_id == batch.work.worker_id:
            self._planned = None
        self._pass_void()

    def skip(self, skipped: Skipped) -> None:
        """Record that a worker skipped its oldest task, which belonged to an earlier generation.

        Raises `ProtocolError` if the worker had to do it.
        """
        task, generation = self.queues.first(skipped.worker), skipped.generation
        if task is None or task[0] != generation or generation == self.generation:
            raise ProtocolError(
                f"worker {skipped.worker} skipped a task of generation {generation}, which it had to do"
            )
        self.queues.pop(skipped.worker, task, is_current=False)

    # Delivery

    def next_deliverable(self) -> Delivery | None:
        """Return the batch that `deliver` would return."""
        if not self.ready:
            return None
        first = self._batches.get(self._first_sequence) or self._first()
        assert first is not None, "what is ready is in flight"
        if self._limits.in_order:
            return first if first.sequence in self.ready else None
        # No batch of a later epoch before all of this epoch are delivered.
        assert first.work is not None
        ready = self._ready_by_epoch.get(first.work.epoch)
        return ready[0] if ready else None

    def deliver(self) -> Delivery | None:
        """Remove and return the next batch for the loop. Return None if it isn't ready."""
        batch = self.next_deliverable() if self.ready else None
        if batch is None:
            return None
        del self._batches[batch.sequence], self.ready[batch.sequence]
        if batch.sequence == self._first_sequence:
            self._first_sequence += 1
        work = batch.work
        if not self._limits.in_order and work is not None:
            self._ready_by_epoch[work.epoch].popleft()
        self.queues.note_delivered(batch.worker)
        self.num_delivered += 1
        if isinstance(work, StreamWork):
            self._pass_void()
        return batch

    @property
    def may_assign(self) -> bool:
        """Whether a batch is lost, or fewer are in flight than may be."""
        return bool(self._lost) or len(self._batches) < self._limits.max_in_flight

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
        return [] if batch is None or batch.state is not BatchState.SENT else [batch.worker]

    def work_of(self, serial: int) -> Work | None:
        """Return what a worker is building; None if it is idle or builds for an old generation."""
        task = self.queues.first(serial)
        batch = self._batches.get(task[1]) if task is not None and task[0] == self.generation else None
        return None if batch is None else batch.work

    # Inside

    def _peek(self) -> Work | None:
        if self._planned is None and self.source is not None:
            self._planned = self.source.next()
        return self._planned

    def _first(self) -> Delivery | None:
        """Return the oldest batch in flight; None if there is none."""
        # The first item of a dict isn't found in O(1) once many items before it were deleted.
        batches = self._batches
        if not batches:
            return None
        while (batch := batches.get(self._first_sequence)) is None:
            self._first_sequence += 1
        return batch

    def _pass_void(self) -> None:
        """Pass over the batches at the head that don't exist."""
        while (first := self._first()) is not None and first.state is BatchState.VOID:
            del self._batches[first.sequence]

    def __repr__(self) -> str:
        num_lost = sum(map(len, self._lost.values()))
        lost = f", {num_lost} lost" if num_lost else ""
        return f"<Ledger generation {self.generation}, tasks sent: {self.queues!r}, {len(self.ready)} ready{lost}>"
