"""Receives what the actors answer, and turns it into events.

    Ray's thread ──post worker──► Mailbox ──► ActorInbox.wait ──► MessageReader ──► events      one thread at a time
    other threads ──post event──► ───┘

Ray's thread only says which worker may have an answer. The thread that waits takes the answers and decodes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from swift_loader.errors import SharedMemoryFull, SwiftLoaderError
from swift_loader.executors.base import Inbox
from swift_loader.executors.crew import ThreadInbox
from swift_loader.executors.handle import Handle
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.ray.calls import ActorCalls, Broken, Lost
from swift_loader.executors.ray.memory import ActorMemory
from swift_loader.executors.ray.process import ActorProcess
from swift_loader.scheduler.messages import Answered, Disconnected, Event, ExecutorFailed
from swift_loader.transport.messages import Batch, Kind, Received, unpack_frame

RayWorker = Handle[ActorCalls, ActorProcess]

Posted = RayWorker | Event
"""A worker that may have answers, or an event."""


class ActorInbox:
    """One end of the mailbox. See `executors.base.Inbox`."""

    def __init__(self, waiting: ThreadInbox[Any], reader: MessageReader, look: Callable[[], Event | None]) -> None:
        """Return the events of what this inbox gets, as the reader reads it.

        `waiting`: what is posted. `look` is called before each wait. It returns an event if nothing would end the wait.
        """
        self.interrupt: Exception | None = None
        self.is_taking_in = False
        self._waiting = waiting
        self._reader = reader
        self._look = look

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the actors have answered; see `executors.base.Inbox.wait`."""
        if (seen := self._look()) is not None:
            return [seen]
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            posted = self._waiting.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            self.is_taking_in = bool(posted)
            events: list[Event] = []
            for one in posted:
                if isinstance(one, Handle):
                    read_answers(one, self._reader, self, events)
                else:
                    events.append(one)
            if events or not posted:
                return events
            self.is_taking_in = False  # there were only answers that are no events, or not their turn

    def wake(self) -> None:
        """End the current `wait` and all later ones, until `sleep`. Thread-safe."""
        self._waiting.wake()

    def sleep(self) -> None:
        """Let `wait` block again."""
        self._waiting.sleep()

    def __repr__(self) -> str:
        return f"<ActorInbox of {self._waiting!r}>"


def read_answers(worker: RayWorker, reader: MessageReader, inbox: Inbox, events: list[Event]) -> None:
    """Add the events of all answers of a worker that are here. `inbox` gets what interrupts the decoding."""
    while (answer := worker.channel.take()) is not None:
        if isinstance(answer, Lost):
            worker.process.note_loss(answer.reason)
            events.append(Disconnected(worker.serial, worker.worker_id))
        elif isinstance(answer, Broken):
            events.append(_failure_of(worker, answer.error))
        else:
            assert isinstance(worker.memory, ActorMemory)
            worker.memory.arrive(answer.memory)
            _read_messages(worker, answer.messages, reader, inbox, events)


def _read_messages(
    worker: RayWorker, messages: Sequence[bytes], reader: MessageReader, inbox: Inbox, events: list[Event]
) -> None:
    try:
        for message in messages:
            event = reader.read(worker, Received(_in_our_time(worker, message), []), inbox)
            if event is not None:
                events.append(event)
    except SwiftLoaderError as error:  # other errors propagate to the loop: a signal handler may have raised them
        worker.channel.close()
        events.append(ExecutorFailed(error))


def _in_our_time(worker: RayWorker, message: bytes) -> memoryview:
    """Return a message in which a batch of another machine, which has another clock, ends when it is here."""
    frame = unpack_frame(memoryview(message))
    if frame.kind is not Kind.BATCH or not worker.process.is_elsewhere:
        return memoryview(message)
    batch = Batch.unpack(frame)
    batch.began_ns = time.perf_counter_ns() - batch.fetch_ns - batch.collate_ns - batch.encode_ns
    batch.meta = bytes(batch.meta)
    return memoryview(batch.pack())


def _failure_of(worker: RayWorker, error: BaseException) -> Event:
    """Return the event of a call that failed although the actor lives: its result couldn't be stored, above all."""
    if not worker.tasks:
        return ExecutorFailed(error)
    task = worker.tasks[0]
    worker.note_answer()
    if type(error).__name__ in ("ObjectStoreFullError", "OutOfDiskError"):
        error = SharedMemoryFull(
            f"the object store of a Ray node has no room for a batch ({error}). Give the node more "
            f"(`ray start --object-store-memory`), lower batch_size or data_queue_size (DataLoader: "
            f"prefetch_factor), or keep fewer batches"
        )
    return Answered(worker.serial, task.generation, task.sequence, error=error)
