"""Work for tests of what hands it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swift_loader.scheduler.work import IndexWork, StreamWork


@dataclass
class IndexSource:
    """The batches of one epoch, given their keys."""

    epoch: int
    step: int
    batches: Iterator[Any]

    def next(self) -> IndexWork | None:
        self.step += 1
        return next((IndexWork(self.epoch, self.step - 1, indices) for indices in self.batches), None)

    def end_shard(self, work: StreamWork) -> None:
        pass

    def swap(self, work: StreamWork) -> StreamWork:
        return work
