"""Records which worker builds which batch, and which batch comes next.

(generation, sequence) identifies a batch. A generation begins when the loop is sent to a position; sequences count its
batches in the order of delivery, without end. The answers to tasks of earlier generations are dropped.

Guarantees: a batch is assigned once per generation, and again only when its worker is gone. It is delivered once. At
most `max_in_flight` batches are in flight. A worker with `max_ready_per_worker` READY batches gets no new ones. Not
thread-safe.
"""

from __future__ import annotations

from swift_loader.errors import ProtocolError
from swift_loader.sampling.work import IndexWork, PlannedWork, StreamWork, Work, WorkSource
from swift_loader.scheduler.delivery import BatchState, Delivery
from swift_loader.scheduler.messages import Action, Answered, NoBatch, SampleFailed, Send
from swift_loader.scheduler.queues import Limits, Worker, Workers


class Ledger:
    """The batches in flight of one generation."""

    def __init__(self, workers: Workers, generation: int = 0, source: WorkSource | None = None) -> None:
        """Begin with nothing in flight. The workers may have tasks of earlier generations."""
        self.workers = workers
        self.generation = generation
        """0: nothing is handed out yet."""
        self.source = source
        """What hands out the work. None: there is none."""
        self._planned: Work | None = None
        """Handed out by the source, but not assigned yet."""
        self._batches: dict[int, Delivery] = {}
        """The batches in flight by sequence, in that order."""
        self._first_sequence = 0
        """None in flight comes before it."""
        self._next_sequence = 0
        self.num_delivered = 0
        """How many batches were delivered."""
        self._lost: set[int] = set()
        """The sequences of LOST batches."""
        self.ready: dict[int, Delivery] = {}
        """The READY batches by sequence, in the order of completion."""

    def in_flight(self) -> list[Delivery]:
        """Return the batches that workers have, or that wait to be delivered."""
        return list(self._batches.values())

    # Workers

    def use_limits(self, limits: Limits) -> None:
        """Work this far ahead from now on, for another number of workers.

        Batches that a sampler chose for one worker may be built by any worker then: theirs may be leaving.
        """
        self.workers.use_limits(limits)
        for batch in self._batches.values():
            if isinstance(batch.work, IndexWork):
                batch.work = batch.work._replace(worker_id=None)
        if isinstance(self._planned, IndexWork):
            self._planned = self._planned._replace(worker_id=None)

    def remove_worker(self, worker: Worker) -> int:
        """Remove a worker. Return how many batches were lost with it; other workers will build them."""
        self.workers.remove(worker)
        lost = [task.sequence for task in worker.tasks if task.generation == self.generation]
        for sequence in lost:
            batch = self._batches[sequence]
            batch.state, batch.failures = BatchState.LOST, ()
        self._lost.update(lost)
        return len(lost)

    # Tasks and answers

    def assign(self, actions: list[Action], now_s: float) -> None:
        """Add the tasks to send now, which count as sent: as many as there is room for.

        Raises what the source of work raised.
        """
        if self._lost:
            self._assign_lost(actions, now_s)
        source, batches, pick = self.source, self._batches, self.workers.pick
        while len(batches) < self.workers.limits.max_in_flight and source is not None:
            self._planned = work = self._planned or source.next()
            if work is None:
                return
            worker = pick(work)
            if worker is None and isinstance(work, StreamWork) and not self.workers.limits.in_order:
                full = work.worker_id
                while worker is None:  # out of order, a shard whose worker has no room lets the others pass
                    self._planned = work = source.swap(work)
                    if work.worker_id == full:
                        return
                    worker = pick(work)
            if worker is None:
                return
            batch = batches[self._next_sequence] = Delivery(work, self._next_sequence)
            self._next_sequence += 1
            self._planned = None
            actions.append(self._send(worker, batch, work, now_s))

    def _assign_lost(self, actions: list[Action], now_s: float) -> None:
        """Send lost batches again, in the order of delivery: the loop waits for them."""
        full: set[int | None] = set()
        for sequence in sorted(self._lost):
            batch = self._batches[sequence]
            work = batch.work
            assert work is not None
            worker_id = None if isinstance(work, PlannedWork) else work.worker_id
            if worker_id in full:  # else each of many asks in vain
                continue
            worker = self.workers.pick(work, is_lost=True)
            if worker is None:
                full.add(worker_id)
            else:
                self._lost.discard(sequence)
                actions.append(self._send(worker, batch, work, now_s))

    def _send(self, worker: Worker, batch: Delivery, work: Work, now_s: float) -> Send:
        task = Send(worker.serial, self.generation, batch.sequence, work, now_s)
        worker.push(task)
        batch.state, batch.worker = BatchState.SENT, worker.serial
        return task

    def take_in(self, answer: Answered | NoBatch, now_s: float) -> Worker:
        """Record the answer to a worker's oldest task. Return the worker. If there is a batch, it is READY then.

        Raises `ProtocolError` if the task isn't the oldest one, or can't be answered so. Then nothing has changed.
        """
        task = answer.task
        worker = self.workers.by_serial.get(task.worker)
        due = worker.tasks[0] if worker is not None and worker.tasks else None
        if worker is None or due is not task:
            raise ProtocolError(f"worker {task.worker} answered {task}, but its next task is {due or 'none'}")
        batch = self._batches[task.sequence] if task.generation == self.generation else None
        if batch is not None:
            if isinstance(answer, Answered):
                batch.batch, batch.error, batch.lease = answer.batch, answer.error, answer.lease
                batch.snapshot, batch.arrival, batch.build_s = answer.snapshot, answer.arrival, answer.build_s
                if batch.error is not None and batch.build_s is None:
                    batch.build_s = now_s - worker.since_s
                batch.state = BatchState.READY
                self.ready[batch.sequence] = batch
            else:
                self._end_shard(batch)
        build_s = answer.build_s if isinstance(answer, Answered) else None
        worker.reads_ahead |= isinstance(answer, Answered) and answer.reads_ahead
        self.workers.pop(worker, batch, build_s, now_s)
        return worker

    def _end_shard(self, batch: Delivery) -> None:
        """Record that there is no such batch: a worker's shard of a stream has ended before."""
        if not isinstance(batch.work, StreamWork) or self.source is None:
            raise ProtocolError(f"worker {batch.worker} had no batch for a task that isn't of a stream")
        batch.state = BatchState.VOID
        self.source.end_shard(batch.work)
        if isinstance(self._planned, StreamWork) and self._planned.worker_id == batch.work.worker_id:
            self._planned = None
        self._pass_void()

    def note_failure(self, failed: SampleFailed) -> None:
        """Record the failure of a sample, if its batch is needed. What a worker reports ends with the worker."""
        if failed.task.generation == self.generation:
            self._batches[failed.task.sequence].failures += (failed.failure,)

    # Delivery

    def next_deliverable(self) -> Delivery | None:
        """Return the batch that `deliver` would return."""
        if not self.ready:
            return None
        first = self._batches.get(self._first_sequence) or self._first()
        assert first is not None, "what is ready is in flight"
        if self.workers.limits.in_order:
            return first if first.state is BatchState.READY else None
        # No batch of a later epoch before all of this epoch are delivered.
        assert first.work is not None
        epoch = first.work.epoch
        for batch in self.ready.values():
            if batch.work is not None and batch.work.epoch == epoch:
                return batch
        return None

    def deliver(self) -> Delivery | None:
        """Remove and return the next batch for the loop. Return None if it isn't ready."""
        batch = self.next_deliverable() if self.ready else None
        if batch is None:
            return None
        del self._batches[batch.sequence], self.ready[batch.sequence]
        if batch.sequence == self._first_sequence:
            self._first_sequence += 1
        work = batch.work
        self.workers.note_delivered(batch.worker)
        self.num_delivered += 1
        if isinstance(work, StreamWork):
            self._pass_void()
        return batch

    @property
    def may_assign(self) -> bool:
        """Whether a batch is lost, or fewer are in flight than may be."""
        return bool(self._lost) or len(self._batches) < self.workers.limits.max_in_flight

    @property
    def is_exhausted(self) -> bool:
        """Whether the source has no more work, and all batches were delivered."""
        return not self._batches and self._peek() is None

    def head(self) -> Work | None:
        """Return the oldest work that isn't delivered: in order, the next one. None if there is none."""
        first = self._first()
        return self._peek() if first is None else first.work

    # For those who judge workers

    def awaited(self) -> list[Worker]:
        """Return the workers that the loop waits for: at most one in order, maybe several in completion order.

        If the next batch is LOST, none of those that may build it has room, so it waits for all of them.
        """
        batch = self._first()
        if not self.workers.limits.in_order or (batch is not None and batch.state is BatchState.LOST):
            return self.workers.busy()
        return [] if batch is None or batch.state is not BatchState.SENT else [self.workers.by_serial[batch.worker]]

    def work_of(self, worker: Worker) -> Work | None:
        """Return what a worker is building; None if it is idle or builds for an old generation."""
        task = worker.tasks[0] if worker.tasks else None
        return task.work if task is not None and task.generation == self.generation else None

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
        lost = f", {len(self._lost)} lost" if self._lost else ""
        return f"<Ledger generation {self.generation}, tasks sent: {self.workers!r}, {len(self.ready)} ready{lost}>"
