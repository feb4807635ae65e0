"""Work for tests of what hands it out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from swift_loader.sampling.skips import Position
from swift_loader.sampling.work import IndexWork, PlannedSource, WorkSource


def planned(epoch: int, step: int, num_batches: Callable[[int], int], last_irregular_epoch: int = -1) -> PlannedSource:
    """Return the batches of a plan of which only the lengths of epochs are known, from a position on."""
    plan: Any = SimpleNamespace(
        num_batches=num_batches,
        last_irregular_epoch=last_irregular_epoch,
    )
    return PlannedSource(plan, Position(epoch, 0), step)


class IndexQueue(WorkSource):
    """Work that a sampler has drawn. In order, worker i builds every n-th batch from batch i on."""

    def __init__(self, epoch: int, num_workers: int, *, in_order: bool) -> None:
        self._epoch, self._num_bound = epoch, num_workers if in_order else 0
        self._drawn: deque[IndexWork] = deque()

    def unbind(self) -> None:
        self._num_bound = 0

    def put(self, step: int, indices: Any) -> None:
        self._drawn.append(IndexWork(self._epoch, step, indices, step % self._num_bound if self._num_bound else None))

    def next(self) -> IndexWork | None:
        work = self._drawn.popleft() if self._drawn else None
        return work if work is None or self._num_bound else work._replace(worker_id=None)
