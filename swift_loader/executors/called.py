"""Workers that are called, and have no pipe: actors of Ray, and processes of torch's DataLoader.

    the thread that acts ──post──► channel ──► worker
    another thread ──a call is done──► note_news       the thread that leads ──drain──► answers, in the calls' order

Whoever learns that a worker may have answered posts its handle where the inboxes listen. The thread that leads takes
the answers, and decodes them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError, SwiftLoaderError
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.handle import Handle
from swift_loader.executors.inbox import WorkerInbox
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.wording import Explainer
from swift_loader.options import DeliveryOptions
from swift_loader.runtime import raise_interrupt
from swift_loader.scheduler.delivery import Lease
from swift_loader.scheduler.messages import Answered, Disconnected, Event, ExecutorFailed
from swift_loader.transport.messages import NO_SLOT, Batch, Received
from swift_loader.transport.segments import Segment
from swift_loader.worker.called import Reply
from swift_loader.worker.spec import WorkerSpec

MAX_WAIT_S = 1e6
"""A lock can't be waited for much longer."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Instead of an answer."""

    error: BaseException
    is_lost: bool
    """Whether the worker or its answer is gone, and no further answer comes. Else only the call has failed."""


class ArrivedMemory(WorkerMemory):
    """The memory of one worker's batches, each of which comes with its answer."""

    def __init__(self) -> None:
        super().__init__(max_segments=0)
        self._memory: NDArray[np.uint8] | None = None

    def arrive(self, memory: NDArray[np.uint8] | None) -> None:
        """Take in what came with an answer. The answer's last message announces the batch in it."""
        self._memory = memory

    def segment_of(self, batch: Batch) -> Segment | None:  # noqa: ARG002 - it page-locks nothing
        """Return None: what arrives is no segment."""
        return None

    def lend(self, batch: Batch) -> tuple[NDArray[np.uint8], Lease | None]:
        """Return the memory of the batch that has arrived, which is the batch's from now on."""
        if batch.slot == NO_SLOT:  # it is so small that it is in the message
            return np.empty(0, np.uint8), None
        memory, self._memory = self._memory, None
        if memory is None or memory.nbytes < batch.used_nbytes:
            raise ProtocolError(f"a worker announced a batch of {batch.used_nbytes} bytes that didn't come with it")
        return memory, None

    def discard(self, batch: Batch) -> None:  # noqa: ARG002 - there is but one
        """Drop the batch that has arrived."""
        self._memory = None


class CalledHandle(Handle):
    """A worker that is called."""

    memory: ArrivedMemory

    def drain(self, reader: MessageReader, events: list[Event]) -> None:
        """Add the events of all answers that are here."""
        while (answer := self.channel.take()) is not None:
            if isinstance(answer, Reply):
                self.memory.arrive(self.own(answer.memory))
                self._read(answer.messages, reader, events)
            elif answer.is_lost:
                events.append(Disconnected(self.serial, self.worker_id))
            else:
                events.append(self.failure(answer.error))

    def _read(self, messages: Sequence[bytes], reader: MessageReader, events: list[Event]) -> None:
        try:
            for message in messages:
                event = reader.read(self, Received(self.in_our_time(message), []))
                if event is not None:
                    events.append(event)
        except SwiftLoaderError as error:  # other errors propagate to the loop: a signal handler may have raised them
            raise_interrupt(error)
            self.channel.close()
            events.append(ExecutorFailed(error))

    def own(self, memory: NDArray[np.uint8] | None) -> NDArray[np.uint8] | None:
        """Return memory of an answer that a batch may keep and write to."""
        return memory

    def in_our_time(self, message: bytes) -> memoryview:
        """Return a message whose times are those of this machine's clock."""
        return memoryview(message)

    def failure(self, error: BaseException) -> Event:
        """Return the event of a call that failed although the worker lives."""
        if not self.tasks:
            return ExecutorFailed(error)
        return Answered(self.answered(self.tasks[0].generation, self.tasks[0].sequence), error=error)


class BellInbox(WorkerInbox):
    """Listens to nothing but its bell."""

    def __init__(self, reader: MessageReader, posted: deque[Event | Handle]) -> None:
        super().__init__(reader, posted)
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def watch(self, worker: Handle) -> None:
        """Do nothing: the fleet posts it."""

    def forget(self, worker: Handle) -> None:
        """Do nothing: `Fleet.reap` closes what it sends."""

    def ring(self) -> None:
        """End the current `wait`, or the next one. Thread-safe."""
        if self._bell.empty():
            self._bell.put(None)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what was posted; see `executors.base.Inbox.wait`."""
        if self.remote is not None and (seen := self.remote.look_at_connection()) is not None:
            return [seen]
        limit_s, events = None if timeout_s is None else min(max(0.0, timeout_s), MAX_WAIT_S), list[Event]()
        while True:
            if not (self._posted or self._is_woken):
                self.is_waiting = True
                with suppress(queue.Empty):
                    self._bell.get(timeout=limit_s)
                self.is_waiting = False
            while not self._bell.empty():  # before the events are taken: a later one rings again
                self._bell.get()
            self._take_posted(events)
            if events or self._is_woken or self.is_closed or limit_s is not None:
                return events

    def close(self) -> None:
        """End the current `wait`. Idempotent."""
        self.is_closed = True
        self.ring()


class CalledFleet(Fleet):
    """The workers of one loader that are called. Each builds its own dataset."""

    def __init__(self, spec: WorkerSpec, options: DeliveryOptions, explainer: Explainer) -> None:
        super().__init__(spec, options, explainer)
        self._announcing = threading.RLock()
        """Held while a worker's news are posted, so that no inbox is closed meanwhile."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        """For `wait_built`: something may have happened."""
        self._began_s = 0.0
        """When the first worker was started."""
        self._first_build: tuple[CalledHandle | None, int, float] | None = None
        """The first worker that has built the dataset, the dataset's length, and how long that took."""

    def note_news(self, serial: int) -> None:
        """Have somebody look for answers of a worker. Any thread."""
        with self._announcing:
            worker = self.workers.get(serial)
            if worker is not None and self.is_running:
                self.post(worker)
        if not self.is_running:
            self._news.put(None)

    def await_first(self, due: list[tuple[float, Callable[[], None]]]) -> tuple[int, float]:
        """Wait until a worker has built the dataset. Return the same as `wait_built`, and raise the same.

        `due`: what is done if that takes longer than so many seconds.
        """
        due.sort(key=lambda one: one[0])
        while (built := self._first_build or self._look()) is None:
            left_s = due[0][0] + self._began_s - time.monotonic() if due else MAX_WAIT_S
            if left_s <= 0:
                due.pop(0)[1]()
                continue
            with suppress(queue.Empty):
                self._news.get(timeout=min(left_s, MAX_WAIT_S))
            self.check_open()
        self._first_build = built
        return built[1:]

    def _look(self) -> tuple[CalledHandle | None, int, float] | None:
        """Return what the first worker that has answered says; None if none has. Its answer stays."""
        lost: list[tuple[CalledHandle, Failed]] = []
        for worker in self.workers.values():
            answer = worker.channel.peek()
            if isinstance(answer, Reply):
                build_s = time.monotonic() - self._began_s
                return worker, self.length_in(memoryview(answer.messages[-1]), who_is(worker)), build_s
            if answer is not None:
                if not answer.is_lost:
                    raise answer.error
                lost.append((worker, answer))
        if lost and len(lost) == len(self.workers):
            self.begin_again(lost)
        return None

    def begin_again(self, lost: Sequence[tuple[CalledHandle, Failed]]) -> None:
        """Replace all workers, none of which has built the dataset before it ended. Raises `WorkerDied` if it can't."""
        raise NotImplementedError

    @property
    def num_inboxes(self) -> int:
        """The loop's, and one for the thread that takes over while the loop is busy."""
        return 2

    def make_inbox(self, reader: MessageReader, posted: deque[Event | Handle]) -> WorkerInbox:
        """Return an inbox."""
        return BellInbox(reader, posted)

    def run(self) -> None:
        """Take what has come up to now, which `wait_built` has left: the first build first."""
        with self.lock:
            self.check_open()
            self.is_running = True
        first = None if self._first_build is None else self._first_build[0]
        for worker in sorted(self.workers.values(), key=lambda one: one is not first):
            self.post(worker)

    def forget(self, worker: Handle) -> None:
        """Do nothing: `reap` closes what it sends."""

    def close_processes(self) -> list[Segment]:
        """Close all handles; see `Fleet`."""
        with self._announcing:
            self.is_running = False
        super().close_processes()
        self.workers, self._first_build = {}, None
        self.posted.clear()
        return []


def who_is(worker: CalledHandle) -> str:
    """Return which worker it is, for messages before the loader has started."""
    return f"the first worker ({worker.place})"
