"""The states of a batch in flight.

    PLANNED ──assign──► SENT ──complete──► READY ──deliver──► GONE, with the user
                        ▲ │ └─────end────► VOID ───pass─────► GONE: its shard of a stream had no batch left
                        │ └─lose─► LOST
                        └──assign───┘       before any other batch, to the worker with the least to do

Only `BATCH_STATES` moves a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.work import Work

Answer = TypeVar("Answer")


class BatchState(str, Enum):
    """Where a batch is."""

    PLANNED = "planned"
    SENT = "sent"
    LOST = "lost"
    READY = "ready"
    VOID = "void"
    GONE = "gone"


class BatchMove(str, Enum):
    """What moves a batch to another state."""

    ASSIGN = "assign"
    COMPLETE = "complete"
    END = "end"
    LOSE = "lose"
    DELIVER = "deliver"
    PASS = "pass"  # noqa: S105 - not a password


class _BatchStates(dict[tuple[BatchState, BatchMove], BatchState]):
    """The state after each legal move. Only a lookup of an illegal one calls a method."""

    def __missing__(self, key: tuple[BatchState, BatchMove]) -> BatchState:
        state, move = key
        raise ProtocolError(f"a batch is {state.value}, which {move.value} can't follow")


BATCH_STATES = _BatchStates(
    {
        (BatchState.PLANNED, BatchMove.ASSIGN): BatchState.SENT,
        (BatchState.LOST, BatchMove.ASSIGN): BatchState.SENT,
        (BatchState.SENT, BatchMove.COMPLETE): BatchState.READY,
        (BatchState.SENT, BatchMove.END): BatchState.VOID,
        (BatchState.SENT, BatchMove.LOSE): BatchState.LOST,
        (BatchState.READY, BatchMove.DELIVER): BatchState.GONE,
        (BatchState.VOID, BatchMove.PASS): BatchState.GONE,
    }
)


@dataclass(slots=True)
class Batch(Generic[Answer]):
    """A batch in flight."""

    sequence: int
    work: Work
    state: BatchState = BatchState.PLANNED
    worker: int = -1
    """The worker that it was sent to last."""
    answer: Answer | None = None
    """Set once the batch is READY."""
