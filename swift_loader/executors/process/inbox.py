"""Receives what the workers send, and turns it into events.

    worker ──channel──► Inbox.wait ──► MessageReader ──► events          one thread at a time
    supervisor's thread ──post──► ───────────────────────┘

An inbox blocks in epoll_wait(2) on the channels and the processes, and uses no CPU while nothing happens. The first
inbox listens to all workers; each further one listens to a part of them, for a thread that takes over while the loop is
busy. So two inboxes know each worker, and only one of them is in use at a time.
"""

from __future__ import annotations

import os
import select
from collections import deque

from swift_loader.errors import SwiftLoaderError
from swift_loader.executors.handle import AnyHandle
from swift_loader.executors.inboxes import Inboxes
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.reader import MessageReader
from swift_loader.scheduler.messages import Disconnected, Event, ExecutorFailed
from swift_loader.transport.descriptors import new_epoll, new_eventfd

_MAX_POLL_S = 1e6
"""epoll_wait(2) takes less than 2**31 ms. A caller that waits longer calls again."""

_MAX_EVENTS = 64


class Posted:
    """Events of the supervisor's thread. Thread-safe: each operation is atomic."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._signal = new_eventfd()
        FORKS.holders.add(self)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are events."""
        return self._signal

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns; -1 once closed."""
        return [self._signal]

    def post(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        if self._signal >= 0:
            os.eventfd_write(self._signal, 1)

    def take(self) -> list[Event]:
        """Return all events, and forget them."""
        os.eventfd_read(self._signal)
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Close the descriptor. Later events are ignored. Idempotent."""
        if self._signal >= 0:
            signal, self._signal = self._signal, -1  # before it is closed, see `Holder`
            os.close(signal)


class Inbox:
    """The channels and processes to listen to. Used by one thread at a time."""

    def __init__(self, reader: MessageReader, posted: Posted | None) -> None:
        """Begin without workers. `posted`: events from elsewhere that this inbox returns, too."""
        self.interrupt: Exception | None = None
        self.is_taking_in = False
        self._reader = reader
        self._posted = posted
        self._workers: dict[int, AnyHandle] = {}
        """By descriptor: of the channel and of the process."""
        self._epoll = new_epoll()
        self._wake = -1
        FORKS.holders.add(self)
        try:
            self._wake = new_eventfd()
            self._epoll.register(self._wake, select.EPOLLIN)
            if posted is not None:
                self._epoll.register(posted.fileno(), select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; some may be -1."""
        return [-1 if self._epoll.closed else self._epoll.fileno(), self._wake]

    def watch(self, worker: AnyHandle) -> None:
        """Also listen to this worker. Any thread may call it, even while another one waits."""
        # Watch the process as well as the pipe: a process that the dataset started may hold a copy of the pipe open.
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            self._workers[descriptor] = worker
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, worker: AnyHandle) -> None:
        """Stop listening to a worker. Call it before its descriptors are closed. Idempotent and thread-safe."""
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            if self._workers.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the workers have sent; see `executors.base.Inbox.wait`."""
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_POLL_S)
        events: list[Event] = []
        while True:
            try:
                ready = self._epoll.poll(limit_s, _MAX_EVENTS)
            except (OSError, ValueError):
                if self._epoll.closed:  # a signal handler closed it meanwhile
                    return events
                raise
            self.is_taking_in = True
            is_woken = False
            for descriptor, _ in ready:
                worker = self._workers.get(descriptor)
                if self._epoll.closed:  # another thread closed it while a batch was decoded
                    return events
                if worker is not None:
                    self._read(worker, descriptor, events)
                elif descriptor == self._wake:
                    is_woken = True
                elif self._posted is not None and descriptor == self._posted.fileno():
                    events += self._posted.take()
            if events or is_woken or not ready:
                return events
            self.is_taking_in = False  # there were only messages that are no events: look for more
            limit_s = None if timeout_s is None else 0.0

    def wake(self) -> None:
        """End the current `wait` and all later ones, until `sleep`. Thread-safe. Does nothing once closed."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def sleep(self) -> None:
        """Let `wait` block again."""
        os.eventfd_read(self._wake)

    def close(self) -> None:
        """Close the descriptors of its own. Idempotent."""
        self._epoll.close()
        if self._wake >= 0:
            wake, self._wake = self._wake, -1  # before it is closed, see `Holder`
            os.close(wake)

    def _read(self, worker: AnyHandle, descriptor: int, events: list[Event]) -> None:
        """Add the event of the worker's next message; of all its messages and its end, if the process has ended."""
        # The event may come from a worker that is gone, whose descriptor number now belongs to another worker.
        has_ended = descriptor == worker.process.pidfd and worker.process.has_ended
        try:
            while (received := worker.channel.receive(wait=False)) is not None:
                event = self._reader.read(worker, received, self)
                if event is not None:
                    events.append(event)
                if not has_ended:
                    return
        except BlockingIOError:
            if not has_ended:
                return
        except SwiftLoaderError as error:  # other errors propagate to the loop: a signal handler may have raised them
            self.forget(worker)
            events.append(ExecutorFailed(error))
            return
        except OSError:
            if self._epoll.closed:
                return
            raise
        self.forget(worker)
        events.append(Disconnected(worker.serial, worker.worker_id))

    def __repr__(self) -> str:
        return f"<Inbox of {len(set(self._workers.values()))} workers>"


ProcessInboxes = Inboxes[Inbox, Posted]
