"""Messages of workers become events."""

from __future__ import annotations

import signal
from types import FrameType, SimpleNamespace
from typing import Any

from swift_loader.executors.base import Outcome
from swift_loader.executors.process.reader import MessageReader


class Alarm(Exception):
    """What the handler raises."""


class Batches:
    """Decodes batches. A signal comes while it decodes each one for the first time."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def read(self, batch: str, memory: object) -> str:
        if batch not in self._seen:
            self._seen.add(batch)
            signal.raise_signal(signal.SIGALRM)
        return batch


def test_each_batch_whose_decoding_is_interrupted_is_decoded_again() -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Alarm

    unused: Any = None
    batches: Any = Batches()
    reader = MessageReader(batches, unused, unused, unused, None, unused)
    worker: Any = SimpleNamespace(memory=SimpleNamespace(lend=lambda batch: (b"", None)))
    inbox: Any = SimpleNamespace(interrupt=None)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        names: list[Any] = ["first", "second"]  # of one call of `Inbox.wait`
        assert [reader._decode(worker, name, inbox) for name in names] == [Outcome("first"), Outcome("second")]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert isinstance(inbox.interrupt, Alarm)
