"""What the scheduler wants done. The executor does it, in this order. Not frozen, see `events`."""

from __future__ import annotations

from dataclasses import dataclass, field

from swift_loader.errors import WorkerDied
from swift_loader.scheduler.events import Death
from swift_loader.scheduler.restarts import Decision
from swift_loader.scheduler.work import Work


@dataclass(slots=True)
class Stall:
    """A wait of the loop that has lasted too long."""

    worker: int | None
    """The worker that has the batch; None if no worker has it."""
    work: Work | None
    """What the worker is at, or what no worker has. None: a batch that isn't needed any more."""
    busy_s: float
    """How long the worker has been at it, or how long the loop has waited."""
    is_trial: bool
    """Whether `work` is the trial batch."""


@dataclass(slots=True)
class WorkerLost:
    """A worker that ended, and the decision about it."""

    worker: int
    worker_id: int
    decision: Decision
    num_in_a_row: int
    """How many workers with this id have ended since their last batch."""
    work: Work | None
    """What it was building; None if it had nothing, or a batch that isn't needed any more."""
    is_trial: bool
    """Whether `work` is the trial batch."""
    num_lost: int
    """How many batches it was assigned."""
    death: Death


@dataclass(slots=True)
class TemplateLost:
    """The template ended, and is replaced together with its workers."""

    error: WorkerDied
    num_in_a_row: int
    """How many templates have ended since the last batch."""


@dataclass(slots=True)
class Send:
    """Send a task to a worker."""

    worker: int
    generation: int
    """0: the trial batch."""
    sequence: int
    work: Work
    sent_s: float = field(default=0.0, compare=False)
    """When it was decided."""


@dataclass(slots=True)
class Kill:
    """Kill a worker that hangs. Its end is an event."""

    worker: int
    stall: Stall


@dataclass(slots=True)
class Reap:
    """Stop listening to a worker, and find out how it ended. `Ended` follows, even if the worker lives on."""

    worker: int


@dataclass(slots=True)
class Replace:
    """Let go of a worker that is gone, and start another one with its id."""

    worker: int
    worker_id: int


@dataclass(slots=True)
class Release:
    """Let go of a worker that is gone. Nobody takes its place."""

    worker: int


@dataclass(slots=True)
class Start:
    """Start a worker with this id, which no other worker has. Returns before it is ready, which is an event."""

    worker_id: int


@dataclass(slots=True)
class Dismiss:
    """Have a worker end that has nothing left to do. Its end is an event, as any other."""

    worker: int


@dataclass(slots=True)
class ReplaceTemplate:
    """Start another template. The workers that ended with it are replaced one by one."""


@dataclass(slots=True)
class Warn:
    """Warn the user."""

    about: WorkerLost | Stall | TemplateLost


@dataclass(slots=True)
class GiveUp:
    """End this wait of the loop with an error, because no worker has the batch. A later wait may succeed."""

    stall: Stall


@dataclass(slots=True)
class Fail:
    """Raise an error in the loop, after the batches that are ready. Comes once; only `Reap` follows."""

    cause: WorkerLost | BaseException


Action = Send | Kill | Reap | Replace | Release | Start | Dismiss | ReplaceTemplate | Warn | GiveUp | Fail
