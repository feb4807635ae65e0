"""What an executor reports to the scheduler: facts, in the order in which they happened to each worker.

A worker is known by its serial number, which is never used twice. Its first event is `Ready`, or `Disconnected` if it
died before. After `Disconnected` comes only `Ended`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from swift_loader.errors import WorkerDied

__all__ = [
    "Built",
    "Death",
    "Disconnected",
    "Ended",
    "Event",
    "ExecutorFailed",
    "Failed",
    "Ready",
    "SampleFailed",
    "Skipped",
    "StreamEnded",
    "TemplateEnded",
]


class Death(NamedTuple):
    """What an executor knows about the end of a worker."""

    exit_code: int | None = None
    """As from `os.waitstatus_to_exitcode`; None if it is unknown."""
    is_at_work: bool = True
    """Whether it had begun its oldest task. If not, that batch isn't the cause of its end."""
    with_template: bool = False
    """Whether it ended because the template did."""
    traces: str = ""
    """Output of the fault handler, if it crashed."""
    stderr: str = ""
    """The last lines of its stderr."""


class Ready(NamedTuple):
    """A worker takes tasks."""

    worker: int
    place: int
    """Which of the n workers it is, from 0. Its replacement has the same place."""


class Built(NamedTuple):
    """A worker has built the batch of its oldest task."""

    worker: int
    generation: int
    sequence: int
    outcome: Any
    """The batch, as the executor delivers it."""
    build_s: float = 0.0
    """How long the worker took."""


class Failed(NamedTuple):
    """The user's code raised an exception for the batch of a worker's oldest task."""

    worker: int
    generation: int
    sequence: int
    error: BaseException
    """Is delivered in the batch's place."""


class SampleFailed(NamedTuple):
    """A worker leaves out or replaces a sample of the batch of its oldest task, which it answers next."""

    worker: int
    generation: int
    sequence: int
    position: int
    """Of the sample, in the batch as planned."""
    failure: Any


class StreamEnded(NamedTuple):
    """A worker's shard of a stream had no batch left for its oldest task."""

    worker: int
    generation: int
    sequence: int


class Skipped(NamedTuple):
    """A worker skipped its oldest task, because it knows of a later generation."""

    worker: int
    generation: int


class Disconnected(NamedTuple):
    """A worker's stream has ended: nothing more comes from it but `Ended`."""

    worker: int
    place: int


class Ended(NamedTuple):
    """It is known how a worker ended."""

    worker: int
    place: int
    death: Death


class TemplateEnded(NamedTuple):
    """The process is gone that workers are forked from. Its workers end too."""

    error: WorkerDied
    """Says how it ended."""


class ExecutorFailed(NamedTuple):
    """The executor can't continue: a message was invalid, datasets differ, or building one failed."""

    error: BaseException


Event = (
    Built
    | Failed
    | SampleFailed
    | Skipped
    | StreamEnded
    | Ready
    | Disconnected
    | Ended
    | TemplateEnded
    | ExecutorFailed
)
