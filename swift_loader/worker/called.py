"""A worker that is called, and has no pipe: what it is sent and what it sends are arguments and results of calls.

    trainer ──start, build: messages──► CalledWorker ──Reply: messages, memory──► trainer

The messages are those of worker processes. `worker.actor` is one that Ray calls, and `worker.torch_dataset` one that a
worker process of torch's DataLoader calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.messages import NO_SLOT, Batch, Identity, Ready, Received, unpack
from swift_loader.transport.segments import UNKNOWN_ADDRESS, CounterWriter, PrivateSlots
from swift_loader.worker.build import Usage
from swift_loader.worker.loop import DatasetBuilder, TaskLoop


class Reply(NamedTuple):
    """What a call gives."""

    messages: list[bytes]
    """In the order sent."""
    memory: NDArray[np.uint8] | None
    """The bulk data of the batch that the last message announces. None: there is none."""


class CalledWorker:
    """The worker. All calls that run the user's code are on one thread."""

    def __init__(self, usage: type[Usage]) -> None:
        """Build nothing yet. `usage` measures what builds batches."""
        self._usage = usage
        self._channel = _CallChannel()
        self._slots = PrivateSlots()
        """A batch is copied from there before the next call."""
        self._loop: TaskLoop | None = None
        self._lent = NO_SLOT
        """The slot of the last answer."""
        self._counters: CounterWriter | None = None
        """Known once there are tasks."""
        self._newest = 0
        """The current generation."""
        self._thread_id = 0
        """Of the thread that builds."""

    # The thread that builds

    def begin(self, builder: DatasetBuilder, serial: int, identity: Identity | None) -> Reply:
        """Build the dataset. Answers `Ready` or `Failure`.

        `identity`: which of the n workers it is, for a dataset that must know.
        """
        self._thread_id = threading.get_ident()
        if identity is not None:
            self._channel.feed([identity.pack()])
        service = builder.start_fresh(serial, self._channel, self._usage)
        if service is not None:
            batches, report = service
            self._channel.send(Ready(UNKNOWN_ADDRESS, report).pack())
            self._loop = TaskLoop(self._channel, batches, self._slots)
            self._loop.newest_generation = self._newest
            self._counters = batches.samples.counters
        return Reply(self._channel.take_sent(), None)

    def build(self, messages: Sequence[bytes]) -> Reply:
        """Take in messages of the trainer, and answer them. The memory is this call's until the next one begins."""
        loop = self._loop
        assert loop is not None, "the worker has no dataset"
        if self._lent != NO_SLOT:
            self._slots.release(self._lent)
            self._lent = NO_SLOT
        self._channel.feed(messages)
        loop.refill(wait=False)
        while loop.has_tasks:
            loop.do_next()
        sent = self._channel.take_sent()
        return Reply(sent, self._memory_of(unpack(sent[-1])) if sent else None)

    def _memory_of(self, message: object) -> NDArray[np.uint8] | None:
        if not isinstance(message, Batch) or message.slot == NO_SLOT:
            return None
        self._lent = message.slot
        return self._slots.array(message.slot)[: message.used_nbytes]

    # Any thread

    def use_generation(self, generation: int) -> None:
        """Skip tasks of earlier generations."""
        self._newest = max(self._newest, generation)
        if self._loop is not None:
            self._loop.newest_generation = self._newest

    def position(self) -> int | None:
        """Return how many samples of the current batch are done; None if that is unknown."""
        return None if self._counters is None else self._counters.position_in_batch()


class _CallChannel:
    """Stands for the pipe to the trainer. See `worker.loop.TaskChannel`."""

    def __init__(self) -> None:
        self._received: deque[bytes] = deque()
        self._sent: list[bytes] = []

    def feed(self, messages: Sequence[bytes]) -> None:
        """Let `receive` return these."""
        self._received.extend(messages)

    def take_sent(self) -> list[bytes]:
        """Return what was sent since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def send(self, message: bytes) -> None:
        """Keep a message for the answer."""
        self._sent.append(message)

    def receive(self, *, wait: bool = True) -> Received:  # noqa: ARG002 - a call brings all there is
        """Return the next message. Raises `BlockingIOError` if there is none."""
        if not self._received:
            raise BlockingIOError
        return Received(memoryview(self._received.popleft()), [])
