"""Receives what the workers send, and turns it into events.

    worker ──pipe──► Inbox.wait ──► MessageReader ──► events         one thread at a time
    other threads ──post──► ────────────────────────────┘

As `executors.process.inbox`, with `multiprocessing.connection.wait`, which every system has. That can't be told of
further pipes while it waits. So it also waits for a bell, which rings when there is something new.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from swift_loader.errors import SwiftLoaderError
from swift_loader.executors.handle import Handle
from swift_loader.executors.inboxes import Inboxes
from swift_loader.executors.portable.interpreter import Interpreter
from swift_loader.executors.process.reader import MessageReader
from swift_loader.scheduler.messages import Disconnected, Event, ExecutorFailed
from swift_loader.transport.portable import AnyConnection, PipeChannel, new_pipe

PortableWorker = Handle[PipeChannel, Interpreter]


class Bell:
    """Ends the waits of other threads. Thread-safe, and rings at most once until it is silenced."""

    def __init__(self) -> None:
        self.end, self._ours = new_pipe()
        """For `wait`: readable from `ring` until `silence`."""
        self._lock = threading.RLock()  # reentrant: a signal handler may ring it on a thread that does
        self._is_ringing = False

    def ring(self) -> None:
        """End all waits for it, until `silence`. Does nothing once closed."""
        with self._lock:
            if not self._is_ringing and not self._ours.closed:
                self._is_ringing = True
                self._ours.send_bytes(b"!")

    def silence(self) -> None:
        """Let a wait block again."""
        with self._lock:
            if self._is_ringing and not self.end.closed:
                self.end.recv_bytes()
                self._is_ringing = False

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        with self._lock, suppress(OSError):
            self._ours.close()
            self.end.close()


class Posted:
    """Events of other threads. Thread-safe: each operation is atomic."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self.bell = Bell()

    def post(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        self.bell.ring()

    def take(self) -> list[Event]:
        """Return all events, and forget them."""
        self.bell.silence()
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Close the bell. Idempotent."""
        self.bell.close()


class Inbox:
    """The workers to listen to. Used by one thread at a time."""

    def __init__(self, reader: MessageReader, posted: Posted | None) -> None:
        """Begin without workers. `posted`: events from elsewhere that this inbox returns, too."""
        self.interrupt: Exception | None = None
        self.is_taking_in = False
        self._reader = reader
        self._posted = posted
        self._workers: dict[AnyConnection, PortableWorker] = {}
        """By our end of the pipe. Replaced as a whole, so that any thread may read it."""
        self._ended: deque[PortableWorker] = deque()
        """Workers whose process has ended. Their pipes may not have: what the dataset started may hold them open."""
        self._lock = threading.RLock()
        """Guards replacing `_workers`."""
        self._wake = Bell()
        self._change = Bell()
        """Rings when there are other workers, or ended ones."""
        self._is_closed = False

    def watch(self, worker: PortableWorker) -> None:
        """Also listen to this worker. Any thread may call it, even while another one waits."""
        with self._lock:
            self._workers = {**self._workers, worker.channel.end: worker}
        self._change.ring()
        if worker.process.has_ended:
            self.note_end(worker)

    def forget(self, worker: PortableWorker) -> None:
        """Stop listening to a worker. Call it before its pipe is closed. Idempotent and thread-safe."""
        with self._lock:
            self._workers = {end: other for end, other in self._workers.items() if other is not worker}
        self._change.ring()

    def note_end(self, worker: PortableWorker) -> None:
        """Note that the process of a worker has ended. Any thread."""
        self._ended.append(worker)
        self._change.ring()

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the workers have sent; see `executors.base.Inbox.wait`."""
        limit_s = None if timeout_s is None else max(0.0, timeout_s)
        events: list[Event] = []
        bells = [self._wake.end, self._change.end, *([] if self._posted is None else [self._posted.bell.end])]
        while True:
            workers = self._workers
            try:
                ready: list[Any] = wait([*bells, *workers], limit_s)
            except (OSError, ValueError):
                if self._is_closed:  # a signal handler closed it meanwhile
                    return events
                if workers is not self._workers:  # another thread closed the pipe of a worker that is gone
                    continue
                raise
            self.is_taking_in = True
            self._take_in(ready, events)
            if self._is_closed:
                return events
            if self._posted is not None and self._posted.bell.end in ready:
                events += self._posted.take()
            if events or self._wake.end in ready or not ready:
                return events
            self.is_taking_in = False  # there was only what is no event: look for more
            limit_s = None if timeout_s is None else 0.0

    def _take_in(self, ready: list[Any], events: list[Event]) -> None:
        """Add what the workers have sent whose pipes are ready, and what is left of those that have ended."""
        if self._change.end in ready:
            self._change.silence()
        for end in ready:
            worker = self._workers.get(end)
            if worker is not None and not self._is_closed:  # another thread may close it while a batch is decoded
                self._read(worker, events, all_of_it=False)
        while self._ended:
            worker = self._ended.popleft()
            if self._workers.get(worker.channel.end) is worker:
                self._read(worker, events, all_of_it=True)

    def wake(self) -> None:
        """End the current `wait` and all later ones, until `sleep`. Thread-safe. Does nothing once closed."""
        self._wake.ring()

    def sleep(self) -> None:
        """Let `wait` block again."""
        self._wake.silence()

    def close(self) -> None:
        """Close the pipes of its own. Idempotent."""
        self._is_closed = True
        self._wake.close()
        self._change.close()

    def _read(self, worker: PortableWorker, events: list[Event], *, all_of_it: bool) -> None:
        """Add the event of the worker's next message, or of all of them, and of its end."""
        try:
            while (received := worker.channel.receive(wait=False)) is not None:
                event = self._reader.read(worker, received, self)
                if event is not None:
                    events.append(event)
                if not all_of_it:
                    return
        except BlockingIOError:
            if not all_of_it:
                return
        except FileNotFoundError:  # it has ended before its memory was attached; its batches are built again
            pass
        except SwiftLoaderError as error:  # other errors propagate to the loop: a signal handler may have raised them
            self.forget(worker)
            events.append(ExecutorFailed(error))
            return
        if self._is_closed:
            return
        self.forget(worker)
        events.append(Disconnected(worker.serial, worker.worker_id))

    def __repr__(self) -> str:
        return f"<Inbox of {len(self._workers)} workers>"


PortableInboxes = Inboxes[Inbox, Posted]
