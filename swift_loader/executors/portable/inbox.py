"""Waits for workers in `multiprocessing.connection.wait`, which every system has.

That can't be told of further pipes while it waits. So the bell also rings when there are other workers, or ended ones.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from swift_loader.executors.handle import Handle
from swift_loader.executors.inbox import WorkerInbox
from swift_loader.executors.process.reader import MessageReader
from swift_loader.scheduler.messages import Event
from swift_loader.transport.portable import AnyConnection, new_pipe


class PipeInbox(WorkerInbox):
    """The pipes to listen to. Used by one thread at a time."""

    def __init__(self, reader: MessageReader, posted: deque[Event | Handle]) -> None:
        super().__init__(reader, posted)
        self._workers: dict[AnyConnection, Handle] = {}
        """By our end of the pipe. Replaced as a whole, so that any thread may read it."""
        self._ended: deque[Handle] = deque()
        """Workers whose process has ended. Their pipes may not have: what the dataset started may hold them open."""
        self._lock = threading.RLock()  # reentrant: a signal handler may ring on a thread that does
        """Guards replacing `_workers`, and the bell."""
        self._bell, self._clapper = new_pipe()
        self._is_ringing = False
        """Whether the bell's pipe holds a message. It holds at most one."""

    def watch(self, worker: Handle) -> None:
        """Also listen to this worker. Any thread may call it, even while another one waits."""
        with self._lock:
            self._workers = {**self._workers, worker.channel.end: worker}
        self.ring()
        if worker.process.has_ended:
            self.note_end(worker)

    def forget(self, worker: Handle) -> None:
        """Stop listening to a worker. Call it before its pipe is closed. Idempotent and thread-safe."""
        with self._lock:
            self._workers = {end: other for end, other in self._workers.items() if other is not worker}
        self.ring()

    def note_end(self, worker: Handle) -> None:
        """Note that the process of a worker has ended. Any thread."""
        self._ended.append(worker)
        self.ring()

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the workers have sent; see `executors.base.Inbox.wait`."""
        if self.remote is not None and (seen := self.remote.look_at_connection()) is not None:
            return [seen]
        limit_s = None if timeout_s is None else max(0.0, timeout_s)
        events: list[Event] = []
        while True:
            workers = self._workers
            try:
                ready: list[Any] = wait([self._bell, *workers], 0 if self._is_woken else limit_s)
            except (OSError, ValueError):
                if self.is_closed:  # a signal handler closed it meanwhile
                    return events
                if workers is not self._workers:  # another thread closed the pipe of a worker that is gone
                    continue
                raise
            self.is_taking_in = True
            self._take_in(ready, events)
            if events or self._is_woken or self.is_closed or not ready:
                return events
            self.is_taking_in = False  # there was only what is no event: look for more
            limit_s = None if timeout_s is None else 0.0

    def _take_in(self, ready: list[Any], events: list[Event]) -> None:
        """Add what the workers have sent whose pipes are ready, what is left of those that have ended, and the rest."""
        if self._bell in ready:
            with self._lock:
                if self._is_ringing and not self.is_closed:
                    self._bell.recv_bytes()
                    self._is_ringing = False
        for end in ready:
            worker = self._workers.get(end)
            if worker is not None and not self.is_closed:  # another thread may close it while a batch is decoded
                self._read(worker, events, all_of_it=False)
        while self._ended:
            worker = self._ended.popleft()
            if self._workers.get(worker.channel.end) is worker:
                self._read(worker, events, all_of_it=True)
        self._take_posted(events)

    def ring(self) -> None:
        """End the current `wait`, or the next one. Thread-safe. Does nothing once closed."""
        with self._lock:
            if not self._is_ringing and not self.is_closed:
                self._is_ringing = True
                self._clapper.send_bytes(b"!")

    def close(self) -> None:
        """Close the bell. Idempotent."""
        with self._lock, suppress(OSError):
            self.is_closed = True
            self._clapper.close()
            self._bell.close()
