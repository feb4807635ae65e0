"""How a rank gives up a meeting where nobody answers."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.executors.process import meeting
from swift_loader.executors.process.event_loop_thread import EventLoopThread
from swift_loader.executors.process.meeting import MeetingPoint, NotShared


@pytest.fixture
def thread() -> Iterator[EventLoopThread]:
    made = EventLoopThread(lambda: None, lambda error: None)
    yield made
    with made.lock:
        made.stop()
    made.end()
    made.loop.close()


def join(thread: EventLoopThread, start_keeper: Any) -> None:
    launch: Any = SimpleNamespace(start_keeper=start_keeper)
    name = b"\0swift_loader-test-" + uuid.uuid4().hex.encode()
    thread.call(lambda: MeetingPoint(launch, name).join(thread)).result()


def test_a_keeper_that_never_listens_is_waited_for_in_vain(
    thread: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_LIMIT_S", 0.05)
    with pytest.raises(NotShared, match=r"hasn't listened within 0\.05 s"):
        join(thread, lambda listener: None)


def test_a_keeper_that_never_answers_is_waited_for_in_vain(
    thread: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_LIMIT_S", 0.05)
    kept: list[int] = []
    with pytest.raises(NotShared, match=r"hasn't answered within 0\.05 s"):
        join(thread, lambda listener: kept.append(os.dup(listener)))
    os.close(kept[0])


def test_keepers_that_end_before_they_answer_are_started_again_a_few_times(
    thread: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[socket.socket] = []

    def start(listener: int) -> None:
        started.append(socket.socket(fileno=os.dup(listener)))

    def connect(self: MeetingPoint) -> Any:
        connection = try_to_connect(self)
        started[-1].close()  # before it has accepted
        return connection

    try_to_connect = MeetingPoint._try_to_connect
    monkeypatch.setattr(MeetingPoint, "_try_to_connect", connect)
    with pytest.raises(NotShared, match=r"8 processes that were to keep it have ended"):
        join(thread, start)
    assert len(started) == 8
