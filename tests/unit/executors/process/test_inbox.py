"""An inbox turns what it reads into events."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.executors.process.inbox import Inbox
from swift_loader.scheduler.events import Event, Ready
from swift_loader.transport.channel import Channel


class Workers:
    """Two workers that have sent messages. The loader is closed while the first message is read."""

    def __init__(self) -> None:
        pairs = [Channel.pair() for _ in range(2)]
        self.theirs = [theirs for _, theirs in pairs]
        self.pidfds = [os.eventfd(0) for _ in pairs]
        self.all: list[Any] = [
            SimpleNamespace(
                serial=serial, worker_id=serial, channel=ours, process=SimpleNamespace(pidfd=pidfd, has_ended=True)
            )
            for serial, ((ours, _), pidfd) in enumerate(zip(pairs, self.pidfds, strict=True))
        ]
        self.inbox: Inbox | None = None

    def read(self, worker: Any, received: object, inbox: Inbox) -> Event:
        self.close()
        return Ready(worker.serial, worker.worker_id)

    def close(self) -> None:
        assert self.inbox is not None
        for worker in self.all:
            worker.channel.close()
        self.inbox.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    workers.inbox = Inbox(workers, None)  # type: ignore[arg-type]
    for worker in workers.all:
        workers.inbox.watch(worker)
    yield workers
    workers.close()
    for theirs in workers.theirs:
        theirs.close()
    for pidfd in workers.pidfds:
        os.close(pidfd)


def test_another_thread_may_close_while_one_of_several_messages_is_read(workers: Workers) -> None:
    for theirs in workers.theirs:
        theirs.send(b"batch")
    assert workers.inbox is not None
    assert len(workers.inbox.wait(20)) == 1


def test_another_thread_may_close_while_the_last_messages_of_a_worker_are_read(workers: Workers) -> None:
    for _ in range(2):
        workers.theirs[0].send(b"batch")
    os.eventfd_write(workers.pidfds[0], 1)  # it has ended
    assert workers.inbox is not None
    assert len(workers.inbox.wait(20)) == 1
