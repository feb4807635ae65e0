"""The states of a worker.

    STARTING ──ready──► READY ──kill──► KILLED
       │                  │               │
       └───disconnect─────┴──disconnect───┴──abandon──► REAPED ──end──► GONE

    READY ◄──leave, stay──► LEAVING ──dismiss──► DISMISSED ──disconnect──► PARTING ──end──► GONE

A worker that leaves finishes its tasks first. Until it is dismissed, it may also be killed or disconnect, as a READY
one. Only `WORKER_STATES` moves a worker. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.messages import Stall
from swift_loader.scheduler.work import Work


class WorkerState(str, Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    """Its process may exist. It gets no task yet."""
    READY = "ready"
    """It does the tasks that it gets, in the order in which they were sent."""
    KILLED = "killed"
    """It hung and was killed. It gets no more tasks, but answers may still arrive."""
    LEAVING = "leaving"
    """It isn't wanted any more. It finishes the tasks that it has, and gets no others."""
    DISMISSED = "dismissed"
    """It has finished them, and is to end."""
    PARTING = "parting"
    """The executor finds out how it ended after it was dismissed. That isn't a death."""
    REAPED = "reaped"
    """The executor finds out how it ended. Until then its batches aren't given to others."""
    GONE = "gone"


class WorkerMove(str, Enum):
    """What moves a worker to another state."""

    READY = "ready"
    KILL = "kill"
    DISCONNECT = "disconnect"
    ABANDON = "abandon"
    """SIGKILL didn't end it in time."""
    LEAVE = "leave"
    STAY = "stay"
    DISMISS = "dismiss"
    END = "end"


WORKER_STATES: dict[tuple[WorkerState, WorkerMove], WorkerState] = {
    (WorkerState.STARTING, WorkerMove.READY): WorkerState.READY,
    (WorkerState.READY, WorkerMove.KILL): WorkerState.KILLED,
    (WorkerState.STARTING, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.READY, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.KILLED, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.KILLED, WorkerMove.ABANDON): WorkerState.REAPED,
    # The stream of an abandoned worker may end before the executor stops listening to it.
    (WorkerState.REAPED, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.REAPED, WorkerMove.END): WorkerState.GONE,
    (WorkerState.READY, WorkerMove.LEAVE): WorkerState.LEAVING,
    (WorkerState.LEAVING, WorkerMove.STAY): WorkerState.READY,
    (WorkerState.LEAVING, WorkerMove.KILL): WorkerState.KILLED,
    (WorkerState.LEAVING, WorkerMove.DISCONNECT): WorkerState.REAPED,
    (WorkerState.LEAVING, WorkerMove.DISMISS): WorkerState.DISMISSED,
    (WorkerState.DISMISSED, WorkerMove.DISCONNECT): WorkerState.PARTING,
    # Two threads may see the end of a stream, if one takes over from the other at this moment.
    (WorkerState.PARTING, WorkerMove.DISCONNECT): WorkerState.PARTING,
    (WorkerState.PARTING, WorkerMove.END): WorkerState.GONE,
}


@dataclass(slots=True)
class Worker:
    """What the scheduler knows about a worker, apart from its tasks."""

    serial: int
    """Unique among all workers. A replacement is another worker."""
    worker_id: int
    """Which of the n workers it is, from 0. Its replacement has the same id."""
    state: WorkerState = WorkerState.STARTING
    sent_s: deque[float] = field(default_factory=deque)
    """When the unanswered tasks were sent."""
    answered_s: float = 0.0
    """When it last answered."""
    killed_s: float | None = None
    """When it was killed because it hung."""
    stall: Stall | None = None
    """Why it was killed."""
    work: Work | None = None
    """What it was building when it disconnected."""

    def move(self, move: WorkerMove) -> None:
        """Go to the next state. Raises `ProtocolError` if there is no such move from this state."""
        state = WORKER_STATES.get((self.state, move))
        if state is None:
            raise ProtocolError(f"worker {self.serial} is {self.state.value}, which {move.value} can't follow")
        self.state = state

    @property
    def busy_since_s(self) -> float:
        """When it was killed, or else began its oldest task; infinite if it has none."""
        if self.killed_s is not None:
            return self.killed_s
        return max(self.sent_s[0], self.answered_s) if self.sent_s else math.inf

    def note_answer(self, now_s: float) -> None:
        """Record that it has answered its oldest task."""
        self.answered_s = now_s
        self.sent_s.popleft()

    def postpone(self, seconds: float) -> None:
        """Treat its tasks as sent this much later, because the trainer was stopped and perhaps the worker too."""
        self.answered_s += seconds
        if self.killed_s is not None:
            self.killed_s += seconds
        self.sent_s = deque(sent_s + seconds for sent_s in self.sent_s)
