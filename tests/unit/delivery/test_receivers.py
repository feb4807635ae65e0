"""Threads hand the receiving back and forth."""

from __future__ import annotations

import threading

from swift_loader.delivery.receivers import Receivers
from swift_loader.executors.base import Inbox
from swift_loader.scheduler.events import Event, Ready

NUM_EVENTS = 2000
"""So many come one after another, as from workers that build small batches."""


class BusyInbox:
    """Has another event at each `wait`, which returns once the inbox was woken."""

    interrupt: Exception | None = None
    is_taking_in = False

    def __init__(self) -> None:
        self.num_waits = 0
        self._woken = threading.Event()

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        assert self._woken.wait(20)
        self.num_waits += 1
        return [Ready(0, 0)] if self.num_waits < NUM_EVENTS else []

    def wake(self) -> None:
        self._woken.set()

    def sleep(self) -> None:
        self._woken.clear()


def test_the_loop_takes_over_even_if_events_keep_arriving() -> None:
    def receive(inbox: Inbox) -> None:
        inbox.wait()

    inbox, failures = BusyInbox(), list[BaseException]()
    receivers = Receivers([BusyInbox(), inbox], receive, failures.append)
    receivers.begin()
    receivers.hand_over()
    receivers.take()
    receivers.stop()
    assert inbox.num_waits <= 3
    assert not failures
