"""Threads hand the receiving back and forth."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

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
    receivers = Receivers([BusyInbox(), inbox], receive, failures.append, lambda: None)
    receivers.begin()
    receivers.hand_over()
    receivers.take()
    receivers.stop()
    assert inbox.num_waits <= 3
    assert not failures


def test_an_inbox_that_is_added_gets_a_thread_with_the_next_hand_over_and_none_after_the_end() -> None:
    heard = threading.Semaphore(0)

    def receive(inbox: Inbox) -> None:
        inbox.wait()
        heard.release()

    inboxes: list[Inbox] = [BusyInbox() for _ in range(4)]
    receivers = Receivers(inboxes[:2], receive, lambda error: None, lambda: None)
    receivers.begin()
    receivers.add(inboxes[:3])
    receivers.add(inboxes[:3])
    before = threading.active_count()
    receivers.hand_over()
    assert threading.active_count() == before + 1
    inboxes[2].wake()
    assert heard.acquire(timeout=20)
    receivers.take()
    receivers.stop()
    receivers.add(inboxes)
    receivers.hand_over()
    assert threading.active_count() == before - 1


def test_the_threads_take_over_if_the_loop_stays_away_after_short_steps() -> None:
    led, looks = threading.Event(), threading.Semaphore(0)

    def receive(inbox: Inbox) -> None:
        if inbox.wait():
            led.set()

    def look() -> None:
        looks.release()
        if may_take.is_set():
            receivers.hand_over()

    may_take = threading.Event()
    inbox = BusyInbox()
    receivers = Receivers([BusyInbox(), inbox, BusyInbox()], receive, lambda error: None, look)
    receivers.begin()
    for _ in range(20):
        receivers.take()
        now_ns = time.perf_counter_ns()
        receivers.leave(now_ns, now_ns, is_epoch_over=False)
    led.clear()
    assert receivers.loop_leads
    assert looks.acquire(timeout=20)
    assert receivers.loop_leads
    may_take.set()
    inbox.wake()
    assert led.wait(20)
    assert repr(receivers) == "<Receivers: the threads lead, 2 threads>"
    receivers.stop()


@pytest.mark.parametrize("num_lines", range(25))
def test_a_parked_thread_may_stop_the_receivers_itself_wherever_it_is(
    num_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close a loader between any two lines of any thread."""
    monkeypatch.setattr("swift_loader.delivery.receivers.LOOK_S", 0.001)
    parked, stopped = threading.Event(), threading.Event()
    lines = itertools.count()

    def trace(frame: object, event: str, argument: object) -> Any:
        if event == "line" and parked.is_set() and next(lines) == num_lines:
            receivers.stop()
            stopped.set()
        return trace

    def receive(inbox: Inbox) -> None:
        inbox.wait()

    receivers = Receivers([BusyInbox(), BusyInbox()], receive, lambda error: None, lambda: None)
    threading.settrace(trace)
    try:
        receivers.begin()
    finally:
        threading.settrace(None)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "swift_loader-receiver"]
    parked.set()
    assert stopped.wait(20)
    thread.join(20)
    assert not thread.is_alive()
