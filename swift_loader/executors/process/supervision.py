"""What `ProcessExecutor` needs of whoever starts its workers and learns how they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from swift_loader.executors.handle import AnyHandle
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.process.inbox import Inboxes
from swift_loader.executors.wording import Wording
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.segments import Segment
from swift_loader.transport.template_messages import Built
from swift_loader.worker.spec import WorkerSpec

__all__ = ["DatasetSource", "Supervision", "WorkerGroup"]


class DatasetSource(Protocol):
    """Where the workers' dataset comes from."""

    @property
    def first(self) -> Built | None:
        """The report on the dataset."""
        ...

    @property
    def description(self) -> str:
        """A line for the log about where the dataset is; empty if there is nothing to say."""
        ...

    @property
    def definitions(self) -> Definitions:
        """The definitions that travel by value."""
        ...

    @property
    def datasets(self) -> DatasetCheck:
        """Compares the workers' datasets."""
        ...

    def ask_for_stacks(self) -> str:
        """Return the Python stacks of the process that builds the dataset. Blocks for half a second at most."""
        ...


class WorkerGroup(Protocol):
    """The workers that exist."""

    @property
    def all(self) -> Mapping[int, AnyHandle]:
        """By serial number. Any thread may read it."""
        ...

    def start_others(self) -> None:
        """Have the workers started that `Supervision.start_workers` left. Returns at once. Any thread."""
        ...


class Supervision(Protocol):
    """Starts and replaces workers. See `Supervisor` for the methods."""

    owner: ProcessOwner

    @property
    def spec(self) -> WorkerSpec:
        """What the workers build."""
        ...

    @property
    def options(self) -> DeliveryOptions:
        """How many there are, and how they are listened to."""
        ...

    @property
    def wording(self) -> Wording:
        """For errors and warnings."""
        ...

    @property
    def templates(self) -> DatasetSource:
        """Where their dataset comes from."""
        ...

    @property
    def workers(self) -> WorkerGroup:
        """Those that exist."""
        ...

    def wait_built(
        self, on_wait: Callable[[], None] | None = None, patience_s: float | None = None
    ) -> tuple[int, float]:
        """Wait until the dataset is built."""
        ...

    def start_workers(self, inboxes: Inboxes) -> None:
        """Start the first workers."""
        ...

    def reap(self, worker: AnyHandle) -> None:
        """Find out how a worker ended. Returns at once; an event tells."""
        ...

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers. Starts and ends none. Raises RuntimeError if their number can't change."""
        ...

    def start_worker(self, worker_id: int) -> None:
        """Start another worker. Returns at once."""
        ...

    def release(self, worker: AnyHandle) -> list[Segment]:
        """Close a worker that was reaped. Nobody takes its place. Returns at once."""
        ...

    def replace(self, worker: AnyHandle) -> list[Segment]:
        """Close a worker that was reaped, and start another one with its id. Returns at once."""
        ...

    def replace_template(self) -> None:
        """Replace the template whose end was posted last. Returns at once."""
        ...

    def stop(self) -> None:
        """Stop all workers. Descriptors stay open."""
        ...

    def close_processes(self) -> list[Segment]:
        """Close all handles. Idempotent."""
        ...
