"""The main loop of a worker process: it receives tasks and sends batches until the trainer closes the channel.

Runs on the process's main thread, and blocks on its channel while it has no task. It shares no lock, pipe or writable
memory with any other worker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from swift_loader.errors import ProtocolError
from swift_loader.transport.counters import NUM_BEGUN
from swift_loader.transport.failpoints import Failpoint, failpoint
from swift_loader.transport.frames import Kind, Received, pack_frame, unpack_frame
from swift_loader.transport.messages import (
    Batch,
    BuildReport,
    Failure,
    Hung,
    NewPlan,
    Ready,
    SampleFailed,
    State,
    StreamEnded,
)
from swift_loader.transport.store import SegmentStore, SlotStore
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError, describe_failure
from swift_loader.worker.stream import StreamEnd

if TYPE_CHECKING:
    from swift_loader.transport.channel import Channel
    from swift_loader.transport.segments import Segment


class TaskChannel(Protocol):
    """The worker's end of its pipe to the trainer."""

    def send(self, message: bytes) -> None:
        """Send a message."""
        ...

    def receive(self, *, wait: bool = True) -> Received | None:
        """Return the next message; None at the end of the stream.

        Raises `BlockingIOError` if `wait` is False and there is no message.
        """
        ...


class RetiringStore(SlotStore, Protocol):
    """The slots of a worker whose trainer may give some up."""

    def retire(self, slot: int) -> None:
        """Forget a slot that the trainer has given up."""
        ...


def run_worker(channel: Channel, builder: BatchBuilder, report: BuildReport, kept: Sequence[Segment]) -> None:
    """Serve until the trainer closes the channel or dies. Owns the channel. `report` is sent to the trainer.

    `kept`: memory of an earlier worker.

    Raises `SystemExit` if the user's code does. The worker must end, and the trainer must see that.
    """
    with suppress(BrokenPipeError, ConnectionResetError):  # the trainer is gone
        announce(channel, builder, report, kept).serve()
    failpoint(Failpoint.WORKER_STOP)


def announce(channel: Channel, builder: BatchBuilder, report: BuildReport, kept: Sequence[Segment] = ()) -> TaskLoop:
    """Tell the trainer that the worker is ready. Return what answers its tasks. The arguments are `run_worker`'s.

    Raises `BrokenPipeError`, sometimes `ConnectionResetError`, if the trainer is gone.
    """
    descriptor = builder.counters.share()
    try:
        channel.send(Ready(builder.counters.length_address(), report).pack(), [descriptor])
    finally:
        os.close(descriptor)
    return TaskLoop(channel, builder, SegmentStore.of_memfds(channel, kept))


class TaskLoop:
    """The tasks of one worker, and the slots it writes to."""

    def __init__(self, channel: TaskChannel, builder: BatchBuilder, store: RetiringStore) -> None:
        self.newest_generation = 0
        """Tasks of earlier ones are skipped, even if no later task is here. Any thread may raise it."""
        self._channel = channel
        self._builder = builder
        self._words = builder.counters.words
        self._store = store
        self._queue: deque[Task] = deque()
        self._plans: deque[NewPlan] = deque()
        """Received plans that aren't used yet."""

    @property
    def has_tasks(self) -> bool:
        """Whether there is a task for `do_next`."""
        return bool(self._queue)

    def serve(self) -> None:
        """Answer the tasks in the order received, each with a batch, a failure, STREAM_ENDED or SKIPPED."""
        while self.refill(wait=True):
            self.do_next()

    def do_next(self) -> None:
        """Answer the next task. There must be one."""
        task = self._queue.popleft()
        self._words[NUM_BEGUN] += 1
        newest = max(self._queue[-1].generation if self._queue else task.generation, self.newest_generation)
        if task.generation < newest:
            self._channel.send(pack_frame(Kind.SKIPPED, generation=task.generation))
        else:
            answer = self._answer(task).pack()
            failpoint(Failpoint.WORKER_AFTER_COMMIT)
            self._channel.send(answer)
            failpoint(Failpoint.WORKER_NOTIFIED)

    def refill(self, *, wait: bool) -> bool:
        """Read all waiting messages; with `wait`, block for one if there is no task.

        It reads all of them because a later task releases slots for the next batch, and may begin a new generation.

        Returns:
            False at the end of the stream.
        """
        while True:
            try:
                received = self._channel.receive(wait=wait and not self._queue)
            except BlockingIOError:
                return True
            if received is None:
                return False
            self._take_in(received)

    def _take_in(self, received: Received) -> None:
        for descriptor in received.descriptors:
            os.close(descriptor)
        frame = unpack_frame(received.data)
        if frame.kind is Kind.PLAN:
            self._plans.append(NewPlan.unpack(frame))
            return
        if frame.kind is Kind.HUNG:
            hung = Hung.unpack(frame)
            self._builder.hung[hung.epoch, hung.index] = hung
            return
        if frame.kind is not Kind.TASK:
            raise ProtocolError(f"a worker was sent a message of kind {frame.kind.name}")
        task = Task.unpack(frame, self._builder.definitions.loads)
        for slot in task.released:
            self._store.release(slot)
        for slot in task.retired:
            self._store.retire(slot)
        self._queue.append(task)
        failpoint(Failpoint.WORKER_RECEIVED)

    def _answer(self, task: Task) -> Batch | Failure | StreamEnded:
        try:
            while self._plans and self._plans[0].generation <= task.generation:
                plan = self._plans.popleft()
                self._builder.use_plan(plan.settings, plan.resume, plan.turn)
            batch = self._builder.build(self._store, task)
            self._report(self._builder.failures, task)
            if (state := self._builder.state) is not None:
                self._channel.send(State(state).pack())
            return batch
        except StreamEnd:
            return StreamEnded(task.generation, task.sequence)
        except BuildError as failed:
            self._report(failed.failures, task)
            error, definitions = failed.__cause__ or failed, self._builder.definitions
            failure = describe_failure(error, failed.stage, definitions, index=failed.index, note=failed.note)
            failure.generation, failure.sequence = task.generation, task.sequence
            return failure

    def _report(self, failures: Sequence[SampleFailed], task: Task) -> None:
        """Send the samples that failed. The trainer gets them before the batch."""
        for failed in failures:
            failed.failure.generation, failed.failure.sequence = task.generation, task.sequence
            self._channel.send(failed.pack())
