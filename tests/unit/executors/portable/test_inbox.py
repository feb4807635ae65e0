"""An inbox turns what it reads into events, and ends its wait when somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader import ProtocolError
from swift_loader.executors.portable.inbox import Bell, Inbox, Inboxes
from swift_loader.scheduler.events import Disconnected, ExecutorFailed, Ready, Skipped
from swift_loader.transport.frames import Received
from swift_loader.transport.pipes import PipeChannel, new_pipe


class Reader:
    """Makes an event of each message that isn't empty."""

    def read(self, worker: Any, received: Received, inbox: Any) -> Skipped | None:
        text = bytes(received.data).decode()
        if text == "bad":
            raise ProtocolError("bad")
        if text == "gone":
            raise FileNotFoundError
        return Skipped(worker.serial, int(text)) if text else None


class Worker:
    def __init__(self, serial: int) -> None:
        self.serial = self.worker_id = serial
        ours, theirs = new_pipe()
        self.channel, self.theirs = PipeChannel(ours), PipeChannel(theirs)
        self.process = SimpleNamespace(has_ended=False)

    def close(self) -> None:
        self.channel.close()
        self.theirs.close()


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    workers = [Worker(serial) for serial in range(3)]
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def inboxes(workers: list[Any]) -> Iterator[Inboxes]:
    inboxes = Inboxes(2, Reader())  # type: ignore[arg-type]
    for worker in workers:
        inboxes.watch(worker)
    yield inboxes
    inboxes.close()
    inboxes.close()


def test_the_first_one_listens_to_all_and_the_others_to_their_part(inboxes: Inboxes, workers: list[Any]) -> None:
    of_loop, *of_threads = inboxes.all
    workers[1].theirs.send(b"5")
    assert of_threads[0].wait(0) == []
    assert of_threads[1].wait(20) == [Skipped(1, 5)]
    workers[1].theirs.send(b"6")
    workers[2].theirs.send(b"7")
    events = of_loop.wait(20)
    while len(events) < 2:
        events += of_loop.wait(20)
    assert {(event.worker, event.generation) for event in events if isinstance(event, Skipped)} == {(1, 6), (2, 7)}


def test_a_message_that_is_no_event_does_not_end_the_wait(inboxes: Inboxes, workers: list[Any]) -> None:
    workers[0].theirs.send(b"")
    workers[0].theirs.send(b"1")
    assert inboxes.all[0].wait() == [Skipped(0, 1)]


def test_the_end_of_a_stream_comes_once_and_after_what_was_sent(inboxes: Inboxes, workers: list[Any]) -> None:
    workers[0].theirs.send(b"1")
    workers[0].theirs.close()
    inbox = inboxes.all[0]
    assert inbox.wait() == [Skipped(0, 1)]
    assert inbox.wait() == [Disconnected(0, 0)]
    assert inbox.wait(0) == []


def test_a_process_that_ended_is_disconnected_even_if_another_one_holds_its_pipe(
    inboxes: Inboxes, workers: list[Any]
) -> None:
    workers[0].theirs.send(b"1")
    inboxes.note_end(workers[0])
    inbox = inboxes.all[0]
    events = inbox.wait()
    assert events[-1] == Disconnected(0, 0)
    assert Skipped(0, 1) in events
    inboxes.forget(workers[0])
    assert inboxes.all[1].wait(0) == []


def test_memory_that_is_gone_is_the_end_of_its_worker(inboxes: Inboxes, workers: list[Any]) -> None:
    workers[0].theirs.send(b"gone")
    assert inboxes.all[0].wait() == [Disconnected(0, 0)]


def test_an_invalid_message_is_the_end_of_the_executor(inboxes: Inboxes, workers: list[Any]) -> None:
    workers[0].theirs.send(b"bad")
    (event,) = inboxes.all[0].wait()
    assert isinstance(event, ExecutorFailed)
    assert inboxes.all[0].wait(0) == []


def test_a_worker_that_is_watched_during_a_wait_is_heard(workers: list[Any]) -> None:
    inbox = Inbox(Reader(), None)  # type: ignore[arg-type]
    events: list[Any] = []
    waiter = threading.Thread(target=lambda: events.extend(inbox.wait()))
    waiter.start()
    inbox.watch(workers[0])
    workers[0].theirs.send(b"1")
    waiter.join()
    inbox.close()
    assert events == [Skipped(0, 1)]


def test_whoever_is_watched_after_its_end_is_disconnected(workers: list[Any]) -> None:
    inbox = Inbox(Reader(), None)  # type: ignore[arg-type]
    workers[0].process.has_ended = True
    inbox.watch(workers[0])
    assert inbox.wait() == [Disconnected(0, 0)]
    inbox.close()


def test_posted_events_reach_the_one_that_waits(inboxes: Inboxes) -> None:
    for inbox in inboxes.all[:2]:
        inboxes.posted.post(Ready(7, 0))
        inboxes.posted.post(Ready(8, 1))
        assert inbox.wait() == [Ready(7, 0), Ready(8, 1)]
        assert inbox.wait(0) == []


def test_waking_ends_this_wait_and_later_ones_until_sleep(inboxes: Inboxes, workers: list[Any]) -> None:
    inbox = inboxes.all[0]
    waiter = threading.Thread(target=inbox.wait)
    waiter.start()
    inbox.wake()
    waiter.join()
    inbox.wake()
    assert inbox.wait() == []
    inbox.sleep()
    workers[2].theirs.send(b"3")
    assert inbox.wait() == [Skipped(2, 3)]


def test_a_bell_rings_once_and_not_after_it_was_closed() -> None:
    bell = Bell()
    for _ in range(3):
        bell.ring()
    bell.silence()
    assert not bell.end.poll(0)
    bell.silence()
    bell.close()
    bell.close()
    bell.ring()
