"""One wait for processes and actors."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from swift_loader.executors.handle import Handle
from swift_loader.executors.ray.mixed import MixedInbox
from swift_loader.scheduler.events import Event


class ToldOfActors:
    """Each `wait` takes 10 ms, and says that an actor may have answered, which it hasn't."""

    interrupt: Exception | None = None
    is_taking_in = False

    def __init__(self) -> None:
        channel: Any = SimpleNamespace(take=lambda: None, fileno=lambda: -1, close=lambda: None)
        nothing: Any = SimpleNamespace(pid=0)
        self.worker = Handle(0, 0, channel, nothing, nothing)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        assert timeout_s is not None
        time.sleep(min(timeout_s, 0.01))
        told: list[Any] = [self.worker]
        return told if timeout_s else []

    def wake(self) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing."""


def test_what_is_no_event_does_not_end_a_wait_before_its_time() -> None:
    reader: Any = None  # there is nothing to read
    inbox = MixedInbox(ToldOfActors(), reader)
    began_s = time.monotonic()
    assert inbox.wait(0.1) == []
    assert time.monotonic() - began_s >= 0.1
