"""The interface between the executor of calls and the place where they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from swift_loader.scheduler.messages import Event, Send

Post = Callable[[Iterable[Event]], None]
"""Takes the events of a task. Any thread calls it. It never blocks."""


class Crew(Protocol):
    """The workers of a stage. Each does one task at a time, in the order sent."""

    def start(self, post: Post) -> None:
        """Begin to take tasks. `post` gets an event for each."""
        ...

    def send(self, task: Send) -> None:
        """Have a worker do a task after those that it has. Never blocks."""
        ...

    def stack(self, worker: int) -> str:
        """Return where a worker is, as a Python stack; empty if that isn't known."""
        ...

    def stop(self) -> None:
        """Begin no more tasks. Any thread. Idempotent."""
        ...

    def join(self, limit_s: float) -> None:
        """Wait until the tasks that have begun are done, at most `limit_s`."""
        ...
