"""The message that asks for a work."""

from __future__ import annotations

from collections.abc import Sequence

from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.work import IndexWork, StreamWork
from swift_loader.transport.task import Task


def task_of(send: Send, released: Sequence[int] = (), retired: Sequence[int] = ()) -> Task:
    """Return the task that asks a worker for what the scheduler sends it."""
    work = send.work
    indices = work.indices if isinstance(work, IndexWork) else None
    turn = work.turn if isinstance(work, StreamWork) else None
    return Task(send.generation, send.sequence, work.epoch, work.step, indices, released, retired, turn)
