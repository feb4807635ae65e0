"""Receives what the rank that loads sends. Used by one thread at a time, as any inbox."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable
from typing import Protocol

from swift_loader.executors.process.forks import FORKS
from swift_loader.scheduler.events import Event
from swift_loader.transport.descriptors import new_epoll, new_eventfd

__all__ = ["GroupInbox", "Mail"]

AWAITED_S = 0.1
"""After so long a wait, the rank that loads is told. It may be at another place, or its loop may not be listening."""

_MAX_POLL_S = 1e6
"""epoll_wait(2) takes less than 2**31 ms. A caller that waits longer calls again."""


class Mail(Protocol):
    """What has come from the rank that loads."""

    @property
    def descriptors_to_watch(self) -> list[int]:
        """Readable when there is something to collect."""
        ...

    def collect(self, inbox: GroupInbox) -> list[Event]:
        """Take in what has come, and return what it means."""
        ...

    def tell_awaited(self) -> None:
        """Tell the rank that loads which batch the loop waits for."""
        ...


class GroupInbox:
    """The events of a rank that shares batches."""

    def __init__(self, mail: Mail, *, is_of_loop: bool) -> None:
        self.interrupt: Exception | None = None
        self.is_taking_in = False
        self._mail = mail
        self._is_of_loop = is_of_loop
        self._epoll = new_epoll()
        self._wake = -1
        FORKS.holders.add(self)
        try:
            self._wake = new_eventfd()
            for descriptor in (self._wake, *mail.descriptors_to_watch):
                self._epoll.register(descriptor, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; some may be -1."""
        return [-1 if self._epoll.closed else self._epoll.fileno(), self._wake]

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what has come; see `executors.base.Inbox.wait`."""
        now_s = time.monotonic()
        ends_s = math.inf if timeout_s is None else now_s + timeout_s
        tells_s = now_s + AWAITED_S if self._is_of_loop else math.inf
        while True:
            ready = self._poll(min(ends_s, tells_s) - now_s)
            if ready is None:
                return []
            self.is_taking_in = bool(ready)
            events = self._mail.collect(self) if ready else []
            now_s = time.monotonic()
            if events or now_s >= ends_s or self._wake in ready:
                return events
            self.is_taking_in = False
            if now_s >= tells_s:
                tells_s = math.inf
                self._mail.tell_awaited()

    def _poll(self, limit_s: float) -> list[int] | None:
        """Return the descriptors that are readable; None if this inbox was closed."""
        try:
            return [descriptor for descriptor, _ in self._epoll.poll(min(max(0.0, limit_s), _MAX_POLL_S))]
        except (OSError, ValueError):
            if self._epoll.closed:  # a signal handler closed it meanwhile
                return None
            raise

    def block_until(self, is_done: Callable[[], bool], limit_s: float | None) -> bool:
        """Take in what comes until something is so. Return False if it isn't within the limit, or if this was woken."""
        ends_s = math.inf if limit_s is None else time.monotonic() + limit_s
        while not is_done():
            ready = self._poll(ends_s - time.monotonic())
            if not ready or self._wake in ready:
                return False
            self._mail.collect(self)
        return True

    def unwatch(self, descriptor: int) -> None:
        """Stop listening to a descriptor that has come to its end."""
        if not self._epoll.closed:
            self._epoll.unregister(descriptor)

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
            wake, self._wake = self._wake, -1  # first, see `Holder`
            os.close(wake)

    def __repr__(self) -> str:
        return f"<GroupInbox{' of the loop' * self._is_of_loop}>"
