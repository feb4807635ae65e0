"""Waits in epoll_wait(2) for worker processes, and uses no CPU while nothing happens."""

from __future__ import annotations

import os
import select
from collections import deque

from swift_loader.executors.handle import Handle
from swift_loader.executors.inbox import WorkerInbox
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.reader import MessageReader
from swift_loader.scheduler.messages import Event
from swift_loader.transport.channel import new_epoll, new_eventfd

_MAX_POLL_S = 1e6
"""epoll_wait(2) takes less than 2**31 ms. A caller that waits longer calls again."""

_MAX_EVENTS = 64


class EpollInbox(WorkerInbox):
    """The channels and processes to listen to. Used by one thread at a time."""

    def __init__(self, reader: MessageReader, posted: deque[Event | Handle]) -> None:
        super().__init__(reader, posted)
        self._workers: dict[int, Handle] = {}
        """By descriptor: of the channel and of the process."""
        self._epoll = new_epoll()
        self._bell = -1
        FORKS.holders.add(self)
        try:
            self._bell = new_eventfd()
            self._epoll.register(self._bell, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; some may be -1."""
        return [-1 if self._epoll.closed else self._epoll.fileno(), self._bell]

    def watch(self, worker: Handle) -> None:
        """Also listen to this worker. Any thread may call it, even while another one waits."""
        # Watch the process as well as the pipe: a process that the dataset started may hold a copy of the pipe open.
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            self._workers[descriptor] = worker
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, worker: Handle) -> None:
        """Stop listening to a worker. Call it before its descriptors are closed. Idempotent and thread-safe."""
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            if self._workers.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the workers have sent; see `executors.base.Inbox.wait`."""
        if self.remote is not None and (seen := self.remote.look_at_connection()) is not None:
            return [seen]
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_POLL_S)
        events: list[Event] = []
        while True:
            try:
                ready = self._epoll.poll(0 if self._is_woken else limit_s, _MAX_EVENTS)
            except (OSError, ValueError):
                if self.is_closed:  # a signal handler closed it meanwhile
                    return events
                raise
            self.is_taking_in = True
            for descriptor, _ in ready:
                worker = self._workers.get(descriptor)
                if self.is_closed:  # another thread closed it while a batch was decoded
                    return events
                if worker is not None:
                    # The event may be of a worker that is gone, whose descriptor's number is another worker's now.
                    process = worker.process
                    self._read(worker, events, all_of_it=descriptor == process.pidfd and process.has_ended)
                elif descriptor == self._bell:
                    os.eventfd_read(descriptor)  # before the events are taken: a later one rings again
                    self._take_posted(events)
            if events or self._is_woken or not ready:
                return events
            self.is_taking_in = False  # there were only messages that are no events: look for more
            limit_s = None if timeout_s is None else 0.0

    def ring(self) -> None:
        """End the current `wait`, or the next one. Thread-safe. Does nothing once closed."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close the descriptors of its own. Idempotent."""
        self.is_closed = True
        self._epoll.close()
        if self._bell >= 0:
            bell, self._bell = self._bell, -1  # before it is closed, see `Holder`
            os.close(bell)
