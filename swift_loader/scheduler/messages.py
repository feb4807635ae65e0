"""What the scheduler hears, and what it wants done: events and actions.

An event is a fact. An executor reports what happens to one worker in the order in which it happened. A worker is known
by its serial number, which is never used twice. Its first event is `Ready`, or `Disconnected` if it died before. After
`Disconnected` comes only `Ended`, and then nothing. The executor carries out actions in the order of the decisions.

The classes aren't frozen, because making a frozen object takes four times as long. Nobody changes them, but the
executor that kills a worker completes its stall.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swift_loader.errors import WorkerDied
from swift_loader.sampling.work import Work
from swift_loader.scheduler.delivery import Lease
from swift_loader.scheduler.restarts import Decision

# Events ---------------------------------------------------------------------------------------------------------------


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
class Answered:
    """A worker has built the batch of its oldest task, or the user's code raised. Fields are as in `Delivery`."""

    task: Send
    batch: Any = None
    error: BaseException | None = None
    lease: Lease | None = None
    snapshot: bytes | None = None
    arrival: tuple[int, ...] | None = None
    build_s: float | None = None
    """How long the worker took. None if it has built no batch."""
    reads_ahead: bool = False
    """Whether the worker reads for the tasks that it has, so it should have many."""


@dataclass(slots=True)
class SampleFailed:
    """A worker leaves out or replaces a sample of the batch of its oldest task, which it answers next."""

    task: Send
    failure: Any
    """A `SampleFailure`."""


@dataclass(slots=True)
class NoBatch:
    """A worker has none for its oldest task: it knows of a later generation, or its shard of a stream has ended."""

    task: Send


@dataclass(slots=True)
class Disconnected:
    """A worker's stream has ended: nothing more comes from it but `Ended`."""

    worker: int
    worker_id: int


@dataclass(slots=True)
class Ended:
    """It is known how a worker ended."""

    worker: int
    death: Death


@dataclass(slots=True)
class TemplateEnded:
    """The process is gone that workers are forked from. Its workers end too."""

    error: WorkerDied
    """Says how it ended."""
    is_replaced: bool = False
    """Whether another one is there already, because it ended before the workers ran."""


@dataclass(slots=True)
class ExecutorFailed:
    """The executor can't continue: a message was invalid, datasets differ, or building one failed."""

    error: BaseException


Event = Answered | SampleFailed | NoBatch | Ready | Disconnected | Ended | TemplateEnded | ExecutorFailed

# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stall:
    """A wait of the loop that has lasted too long."""

    worker: int | None
    """The worker that has the batch; None if no worker has it."""
    work: Work | None
    """What the worker is at, or what no worker has. None: a batch that isn't needed any more."""
    busy_s: float
    """How long the worker has been at it, or how long the loop has waited."""
    is_of_sample: bool = False
    """Whether one sample is to blame, which is left out when the work is done again. The executor sets it."""
    error: BaseException | None = None
    """What the loop gets if the work is left out. The executor says it when it kills the worker."""


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
    """Send a task to a worker, which answers it once, unless it ends before. The answer has this very object."""

    worker: int
    generation: int
    sequence: int
    work: Work
    sent_s: float = field(default=0.0, compare=False)
    """When it was decided."""

    def __str__(self) -> str:
        return f"task {self.sequence} of generation {self.generation}"


@dataclass(slots=True)
class Look:
    """Note which sample a worker is at, because it may have to be killed."""

    worker: int


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
class Release:
    """Let go of a worker that is gone. If another one takes its place, `Start` follows."""

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


Action = Send | Look | Kill | Reap | Release | Start | Dismiss | ReplaceTemplate | Warn | GiveUp | Fail
