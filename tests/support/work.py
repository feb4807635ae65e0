"""Work for tests of what hands it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swift_loader.scheduler.work import IndexWork, WorkSource


@dataclass
class IndexSource(WorkSource):
    """The batches of one epoch, given their keys."""

    epoch: int
    step: int
    batches: Iterator[Any]

    def next(self) -> IndexWork | None:
        self.step += 1
        return next((IndexWork(self.epoch, self.step - 1, indices) for indices in self.batches), None)
