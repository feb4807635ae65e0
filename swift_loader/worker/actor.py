"""A worker that is a Ray actor: it builds the dataset, and answers calls. Runs on any node, and doesn't import Ray.

    trainer ──start, build──► BatchActor ──Reply: messages, memory──► object store ──► trainer

The messages are those of worker processes. They come and go as arguments and results of calls, so there is no pipe. The
result of a call is one object: Ray puts its memory into the object store of this node. All calls that run the user's
code are on one thread. Requests about it are answered on a second one, and a third one waits for the actor's end.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.messages import NO_SLOT, Batch, Identity, Ready, Received, unpack
from swift_loader.transport.payload import Payload
from swift_loader.transport.segments import UNKNOWN_ADDRESS, CounterWriter, PrivateSlots
from swift_loader.worker.build import ThreadUsage
from swift_loader.worker.loop import TaskLoop, start_fresh
from swift_loader.worker.process import stack_of


class Reply(NamedTuple):
    """What a call gives."""

    messages: list[bytes]
    """In the order sent."""
    memory: NDArray[np.uint8] | None
    """The bulk data of the batch that the last message announces. None: there is none."""


class ActorPayload(NamedTuple):
    """What actors build the dataset from. All of them read the same object."""

    payload: Payload
    path: tuple[str, ...]
    """The trainer's import path, as far as the node has it."""
    directory: str | None
    """The trainer's working directory. None: Ray's choice stays."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where an actor runs."""

    pid: int
    host: str
    machine: str
    """As from `machine_id`."""


def machine_id() -> str:
    """Return what tells this boot of this machine from all others: within it, processes have one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


class BatchActor:
    """The worker. Ray calls its methods."""

    def __init__(self) -> None:
        self._channel = _CallChannel()
        self._slots = PrivateSlots()
        """Ray copies a batch from there into the object store before the next call."""
        self._loop: TaskLoop | None = None
        self._lent = NO_SLOT
        """The slot of the last answer."""
        self._counters: CounterWriter | None = None
        """Known once there are tasks."""
        self._newest = 0
        """The current generation."""
        self._thread_id = 0
        """Of the thread that builds."""
        self._end = threading.Event()
        """Never set."""

    # The thread that builds

    def introduce(self) -> Location:
        """Return where it runs. The first call: its answer says that Ray has placed the actor."""
        return Location(os.getpid(), socket.gethostname(), machine_id())

    def start(self, given: ActorPayload, serial: int, identity: Identity | None) -> Reply:
        """Build the dataset. Answers `Ready` or `Failure`.

        `identity`: which of the n workers it is, for a dataset that must know.
        """
        self._thread_id = threading.get_ident()
        _settle(given)
        # A copy: a dataset may write to its arrays, and other actors read the payload.
        payload = Payload(given.payload.layout, np.array(given.payload.memory))
        if identity is not None:
            self._channel.feed([identity.pack()])
        service = start_fresh(payload, serial, self._channel, ThreadUsage)
        if service is not None:
            builder, report = service
            self._channel.send(Ready(UNKNOWN_ADDRESS, report).pack())
            self._loop = TaskLoop(self._channel, builder, self._slots)
            self._loop.newest_generation = self._newest
            self._counters = builder.samples.counters
        return Reply(self._channel.take_sent(), None)

    def build(self, messages: Sequence[bytes]) -> Reply:
        """Take in messages of the trainer, and answer them. The memory is this call's until the next one begins."""
        loop = self._loop
        assert loop is not None, "the actor has no dataset"
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

    # The thread that answers requests

    def use_generation(self, generation: int) -> None:
        """Skip tasks of earlier generations."""
        self._newest = max(self._newest, generation)
        if self._loop is not None:
            self._loop.newest_generation = self._newest

    def position(self) -> int | None:
        """Return how many samples of the current batch are done; None if that is unknown."""
        return None if self._counters is None else self._counters.position_in_batch()

    def stacks(self) -> str:
        """Return the Python stack of the thread that builds, from the user's code on. Empty if it builds nothing."""
        return stack_of(self._thread_id)

    # The thread that waits

    def await_end(self) -> None:
        """Never return: the call fails when the actor ends."""
        self._end.wait()


def _settle(given: ActorPayload) -> None:
    sys.path.extend(entry for entry in given.path if entry not in sys.path and Path(entry).exists())
    if given.directory is not None and Path(given.directory).is_dir():
        os.chdir(given.directory)


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
