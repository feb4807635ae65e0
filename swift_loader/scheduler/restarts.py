"""Decides which deaths of workers the loader survives. Pure bookkeeping, no I/O.

Each worker has an id, 0 to n-1. A worker that died is replaced by another one with the same id. The loader gives up
when too many workers with one id die with no batch in between, or when one batch has ended two workers.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

TEMPLATE = -1
"""Stands for the template. A batch from any worker counts as its success."""

MAX_DEATHS_BY_BATCH = 2
"""The first death may be chance. If the same batch is there at a second one, it is the cause."""


class Decision(Enum):
    """What happens after a worker's death."""

    REPLACE = "replace"
    BATCH_IS_TO_BLAME = "the batch is to blame"
    TOO_MANY = "too many in a row"
    LET_GO = "it was leaving"
    """As REPLACE, but nobody takes its place."""


class Restarts:
    """Counts deaths in a row, by worker id and by batch. Not thread-safe."""

    def __init__(self, budget: int) -> None:
        """Start without deaths.

        `budget`: how many workers in a row with one id may be replaced before one of them builds a batch.
        """
        self._budget = budget
        self._in_a_row: dict[int, int] = {}
        """worker id -> deaths since its last batch"""
        self._by_batch: dict[Hashable, int] = {}
        """batch -> workers that died while building it"""

    @property
    def is_counting(self) -> bool:
        """Whether there were deaths since the last batch. If not, `note_batch` needn't be called."""
        return bool(self._in_a_row or self._by_batch)

    def note_batch(self, worker_id: int, batch: Hashable) -> None:
        """Record that a worker built a batch."""
        self._in_a_row.pop(worker_id, None)
        self._in_a_row.pop(TEMPLATE, None)
        self._by_batch.pop(batch, None)

    def forget_batches(self) -> None:
        """Blame no batch for the deaths so far."""
        self._by_batch.clear()

    def forget_worker(self, worker_id: int) -> None:
        """Count none of the deaths of workers with this id: the next one is a new beginning."""
        self._in_a_row.pop(worker_id, None)

    def note_death(self, worker_id: int, batch: Hashable | None) -> Decision:
        """Record that a worker died while building this batch, if any, and decide what to do."""
        self._in_a_row[worker_id] = self._in_a_row.get(worker_id, 0) + 1
        if batch is not None:
            self._by_batch[batch] = self._by_batch.get(batch, 0) + 1
            if self._budget and self._by_batch[batch] >= MAX_DEATHS_BY_BATCH:
                return Decision.BATCH_IS_TO_BLAME
        return Decision.REPLACE if self._in_a_row[worker_id] <= self._budget else Decision.TOO_MANY

    def num_in_a_row(self, worker_id: int) -> int:
        """Return how many workers with this id died since its last batch."""
        return self._in_a_row.get(worker_id, 0)

    def __repr__(self) -> str:
        return f"<Restarts {sum(self._in_a_row.values())} in a row, budget {self._budget}>"
