from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from swift_loader.executors.thread.inbox import Mailbox
from swift_loader.scheduler.events import Event, Skipped
from tests.support.helpers import wait_until


def test_events_come_in_the_order_in_which_they_were_posted() -> None:
    mailbox = Mailbox[Event]()
    inbox = mailbox.of_loop
    mailbox.post([Skipped(0, 1), Skipped(0, 2)])
    mailbox.post([Skipped(1, 3)])
    assert inbox.wait() == [Skipped(0, 1), Skipped(0, 2), Skipped(1, 3)]
    assert inbox.is_taking_in
    assert inbox.wait(0) == []
    assert not inbox.is_taking_in


def test_a_wait_ends_with_what_another_thread_posts() -> None:
    mailbox = Mailbox[Event]()
    inbox = mailbox.of_loop
    for number in range(100):
        poster = threading.Thread(target=mailbox.post, args=([Skipped(0, number)],))
        poster.start()
        assert inbox.wait() == [Skipped(0, number)]
        poster.join()


def test_waking_ends_all_waits_until_sleep() -> None:
    mailbox = Mailbox[Event]()
    inbox = mailbox.of_loop
    inbox.wake()
    assert inbox.wait() == []
    assert inbox.wait() == []
    inbox.sleep()
    assert inbox.wait(0) == []
    mailbox.post([Skipped(0, 1)])
    assert inbox.wait() == [Skipped(0, 1)]


def test_an_interrupted_wait_loses_nothing() -> None:
    class Alarm(Exception):
        pass

    def handle(number: int, frame: FrameType | None) -> None:
        mailbox.post([Skipped(0, 1)])
        raise Alarm

    mailbox, before = Mailbox[Event](), signal.signal(signal.SIGALRM, handle)
    inbox = mailbox.of_loop
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            inbox.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not inbox.is_taking_in
    assert inbox.num_moves % 2 == 0
    assert inbox.wait() == [Skipped(0, 1)]


def test_other_threads_see_whether_it_blocks() -> None:
    mailbox = Mailbox[Event]()
    inbox = mailbox.of_loop
    waiter = threading.Thread(target=inbox.wait)
    waiter.start()
    wait_until(lambda: inbox.num_moves == 1, "the thread blocks")
    inbox.wake()
    waiter.join()
    assert inbox.num_moves == 2


def test_two_threads_take_turns_and_each_event_comes_once() -> None:
    mailbox = Mailbox[Event]()

    def post_all() -> None:
        for number in range(2000):
            mailbox.post([Skipped(0, number)])

    poster = threading.Thread(target=post_all)
    poster.start()
    got: list[Event] = []
    while len(got) < 2000:
        got += mailbox.of_loop.wait()
        got += mailbox.of_receiver.wait(0)
    poster.join()
    assert got == [Skipped(0, number) for number in range(2000)]
    assert mailbox.of_receiver.wait(0) == []
