"""Turns what the rank that loads has sent into the answers to this rank's tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.executors.base import Inbox, Lease
from swift_loader.executors.batch_reader import BatchReader
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.process.explain import Explainer
from swift_loader.executors.process.lease import LeasedMemory
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.process.resume import ResumePoints
from swift_loader.metrics.metrics import Metrics
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.events import Built, Event
from swift_loader.transport.frames import Kind, Received, unpack_frame
from swift_loader.transport.messages import Batch, Failure, SampleFailed
from swift_loader.transport.segments import Segment

__all__ = ["Answers", "Content"]

_SERIAL = 0

_ANSWER_S = 1e-6
"""What the scheduler believes that a batch takes: it asks for many ahead, because each comes by itself."""


@dataclass(slots=True)
class Content:
    """A batch, or what came in its place. It has the interface of a `WorkerMemory` with one slot."""

    frames: Sequence[bytes]
    worker_id: int
    pid: int
    segment: Segment | None = None
    memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    lease: Lease | None = None
    held: LeasedMemory | None = None
    """Keeps the slot in use."""

    def segment_of(self, batch: Batch) -> Segment | None:  # noqa: ARG002
        """Return the memory of the batch."""
        return self.segment

    def lend(self, batch: Batch) -> tuple[NDArray[np.uint8], Lease | None]:  # noqa: ARG002
        """Return the same as it was when the batch came."""
        return self.memory, self.lease

    def restore(self) -> None:
        """Discard what this process has written to the batch, which must not be in use. Not if it is page-locked."""
        if self.segment is None or self.segment.renew is None:
            return
        self.segment.renew(self.segment)
        if self.lease is None:  # a copy
            self.memory[:] = self.segment.array()[: len(self.memory)]

    def discard(self, batch: Batch) -> None:
        """Do nothing: the slot is free once this object is gone."""


class _Author:
    """The worker that built a batch, as far as its message needs it."""

    serial = _SERIAL
    state: bytes | None = None
    suspected: Sequence[int] = ()

    def __init__(self, content: Content, task: Send) -> None:
        self.worker_id = content.worker_id
        self.memory = content
        self.tasks = deque([task])
        self.place = f"pid {content.pid}"

    def note_answer(self) -> None:
        """Record that it has answered its task."""
        self.tasks.clear()

    def position_in_batch(self) -> int | None:
        """Return None: it isn't known."""
        return None


class Answers:
    """Decodes batches of another rank's workers. Runs on the thread that leads."""

    def __init__(
        self,
        batches: BatchReader,
        explainer: Explainer,
        metrics: Metrics,
    ) -> None:
        """Get ready. See `MessageReader` for the arguments."""
        self._reader = MessageReader(batches, DatasetCheck(), explainer, metrics, None, ResumePoints())

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch so far."""
        return self._reader.largest_batch_nbytes

    def of(self, task: Send, content: Content, inbox: Inbox) -> list[Event]:
        """Return the events that answer a task."""
        author: Any = _Author(content, task)
        events = []
        for data in content.frames:
            frame = unpack_frame(memoryview(data))
            if frame.kind is Kind.BATCH:
                batch = Batch.unpack(frame)
                batch.generation, batch.sequence = task.generation, task.sequence
                event: Event | None = self._reader.read_batch(author, batch, inbox)
                if isinstance(event, Built):
                    event.build_s = _ANSWER_S
            else:
                event = self._reader.read(author, Received(memoryview(_for(task, frame.kind, data)), []), inbox)
            if event is not None:
                events.append(event)
        return events


def _for(task: Send, kind: Kind, data: bytes) -> bytes:
    """Return a worker's message as if it were about this task."""
    frame = unpack_frame(memoryview(data))
    message: Failure | SampleFailed = (Failure if kind is Kind.FAILURE else SampleFailed).unpack(frame)
    failure = message if isinstance(message, Failure) else message.failure
    failure.generation, failure.sequence = task.generation, task.sequence
    return message.pack()
