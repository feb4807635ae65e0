"""The inboxes of an executor: the loop's, and one for each thread that takes over while the loop is busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from swift_loader.executors.base import Inbox
from swift_loader.executors.handle import AnyHandle
from swift_loader.options import DeliveryOptions
from swift_loader.scheduler.messages import Event

MAX_RECEIVERS = 16
"""With more threads, they only wait for each other's GIL."""


def num_receivers(options: DeliveryOptions) -> int:
    """Return how many threads receive while the loop is busy: one per worker, or one for all."""
    return min(options.num_workers, MAX_RECEIVERS) if options.thread_per_worker else 1


class _Posted(Protocol):
    """Events of other threads."""

    def post(self, event: Event) -> None: ...
    def close(self) -> None: ...


class _WorkerInbox(Inbox, Protocol):
    """An inbox that is told which workers to listen to."""

    def watch(self, worker: Any) -> None: ...
    def forget(self, worker: Any) -> None: ...
    def close(self) -> None: ...


APosted = TypeVar("APosted", bound=_Posted)
AnInbox = TypeVar("AnInbox", bound=_WorkerInbox)


class Inboxes(Generic[AnInbox, APosted]):
    """Each worker is known to two inboxes: the loop's, and that of a thread."""

    def __init__(self, options: DeliveryOptions, posted: APosted, make: Callable[[APosted | None], AnInbox]) -> None:
        """Make them. `make` returns an inbox, which also returns the events that are posted here, if it is given it."""
        self.posted = posted
        self.all: list[AnInbox] = []
        """The loop's inbox, then those of the threads."""
        self._make = make
        try:
            self.grow(options)
        except BaseException:
            self.close()
            raise

    def grow(self, options: DeliveryOptions) -> None:
        """Have an inbox for each thread that these options want. Those that are there stay."""
        for number in range(len(self.all), 1 + num_receivers(options)):
            self.all.append(self._make(self.posted if number <= 1 else None))

    def watch(self, worker: AnyHandle) -> None:
        """Listen to a new worker. Any thread."""
        of_loop, *of_threads = self.all
        of_loop.watch(worker)
        if of_threads:
            of_threads[worker.worker_id % len(of_threads)].watch(worker)

    def forget(self, worker: AnyHandle) -> None:
        """Stop listening to a worker. Any thread. Idempotent."""
        for inbox in self.all:  # there may be more threads now than when it began to be listened to
            inbox.forget(worker)

    def close(self) -> None:
        """Close all inboxes."""
        for inbox in self.all:
            inbox.close()
        self.posted.close()
