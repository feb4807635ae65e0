"""What an executor reports to the scheduler: facts, in the order in which they happened to each worker.

A worker is known by its serial number, which is never used twice. Its first event is `Ready`, or `Disconnected` if it
died before. After `Disconnected` comes only `Ended`, and then nothing.

The classes aren't frozen, because making a frozen object takes four times as long. Nobody changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_loader.errors import WorkerDied


@dataclass(slots=True)
class Death:
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


@dataclass(slots=True)
class Ready:
    """A worker takes tasks."""

    worker: int
    worker_id: int
    """Which of the n workers it is, from 0. Its replacement has the same id."""


@dataclass(slots=True)
class Built:
    """A worker has built the batch of its oldest task."""

    worker: int
    generation: int
    sequence: int
    outcome: Any
    """The batch, as the executor delivers it."""
    build_s: float = 0.0
    """How long the worker took."""


@dataclass(slots=True)
class Failed:
    """The user's code raised an exception for the batch of a worker's oldest task."""

    worker: int
    generation: int
    sequence: int
    error: BaseException
    """Is delivered in the batch's place."""


@dataclass(slots=True)
class SampleFailed:
    """A worker leaves out or replaces a sample of the batch of its oldest task, which it answers next."""

    worker: int
    generation: int
    sequence: int
    position: int
    """Of the sample, in the batch as planned."""
    failure: Any


@dataclass(slots=True)
class StreamEnded:
    """A worker's shard of a stream had no batch left for its oldest task."""

    worker: int
    generation: int
    sequence: int


@dataclass(slots=True)
class Skipped:
    """A worker skipped its oldest task, because it knows of a later generation."""

    worker: int
    generation: int


@dataclass(slots=True)
class Disconnected:
    """A worker's stream has ended: nothing more comes from it but `Ended`."""

    worker: int
    worker_id: int


@dataclass(slots=True)
class Ended:
    """It is known how a worker ended."""

    worker: int
    worker_id: int
    death: Death


@dataclass(slots=True)
class TemplateEnded:
    """The process is gone that workers are forked from. Its workers end too."""

    error: WorkerDied
    """Says how it ended."""


@dataclass(slots=True)
class ExecutorFailed:
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
