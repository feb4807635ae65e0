"""A batch on its way from its first task to the loop.

    SENT ──answer──► READY ──deliver──► with the loop
    ▲  │ └─the shard has ended──► VOID: there is no such batch; the next one takes its turn
    │  └─its worker is gone─► LOST
    └──sent again───────────────┘      before any other batch, to the worker with the least to do

The ledger owns it until it delivers it, then the loop's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_loader.sampling.work import Work


class BatchState(Enum):
    """Where a batch is that an engine delivers. Of one that the loop has got, it stays READY."""

    SENT = "sent"
    LOST = "lost"
    READY = "ready"
    VOID = "void"


class LeaseState(Enum):
    """READY ─► TAKEN ─► KEPT; it may end in any of them."""

    READY = "ready"
    """Waits for the loop."""
    TAKEN = "taken"
    """A copy to a device reads it."""
    KEPT = "kept"
    """Nobody but the user keeps it."""


@dataclass(slots=True)
class Lease:
    """A slot that a batch is in. Doesn't keep it."""

    nbytes: int
    num_wasted: int
    """How many of them the batch doesn't fill."""
    forks: Any
    """The `Forks` of this process. Kept here because the module's names may be gone at exit."""
    state: LeaseState = LeaseState.READY
    seen_since: object = None
    """The stamp of the forks when the user's code got the batch. None: it hasn't yet, so no child of a fork uses it."""
    memory: Callable[[], Any] | None = None
    """A weak reference to the bytes that all views of the batch refer to."""

    def show(self) -> None:
        """Note that the user's code gets the batch. A fork's child that comes later may have it."""
        self.seen_since = self.seen_since or self.forks.stamp

    def keep(self) -> None:
        """Note that only the user keeps the batch's memory from here on. Any thread."""
        self.show()
        self.state = LeaseState.KEPT


@dataclass(slots=True)
class Delivery:
    """A batch, the error in its place, or what the loop gets if there is neither. Made for each batch: not frozen."""

    work: Work | None = None
    """What the batch was built for; of a pipeline's result, the place after it. None if there is no batch and no error
    of one."""
    sequence: int = -1
    """Counts the batches of a generation in the order in which they were handed out."""
    worker: int = -1
    """The serial number of the worker that it was sent to last."""
    state: BatchState = BatchState.SENT
    batch: Any = None
    error: BaseException | None = None
    """Why there is no batch. The loop raises it."""
    failures: tuple[Any, ...] = ()
    """The batch's failed samples, in the order in which they were reported: `SampleFailure`s."""
    lease: Lease | None = None
    """The lease of the slot that the batch lies in. None if it lies in no slot."""
    snapshot: bytes | None = None
    """The state of the worker's dataset after the batch, if it came with the batch: a packed `Snapshot`."""
    arrival: tuple[int, ...] | None = None
    """What was measured of the batch, see `Metrics.note_arrival`. None if it wasn't measured."""
    build_s: float | None = None
    """How long the worker took for the batch or its error. None if it has built neither."""
    is_end: bool = False
    """Whether the source of work has ended, so that there is no batch. It may hand out more later."""
    is_batch: bool = True
    """False: the loop has got the error in its place."""
    number: int = -1
    """The batch's number in the metrics; -1 if it has none."""

    def keep(self) -> None:
        """Note that only the user keeps the batch's memory from here on. Any thread."""
        if self.lease is not None:
            self.lease.keep()
