"""Which deaths of workers are survived: pure bookkeeping, no I/O.

Workers have places, 0 to n-1; a worker that died is followed by another one in the same place. A place that loses one
worker after another, with no batch in between, is given up, as is a batch that has ended two workers.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

__all__ = ["TEMPLATE", "Casualties", "Verdict"]

TEMPLATE = -1
"""Stands for the place of the template; a batch from any worker counts as its success."""

MAX_DEATHS_BY_BATCH = 2
"""Once may be chance; a batch that was there both times is to blame."""


class Verdict(Enum):
    """What becomes of a place whose worker died."""

    REPLACE = "replace"
    BATCH_IS_TO_BLAME = "the batch is to blame"
    TOO_MANY = "too many in a row"


class Casualties:
    """The deaths that may turn out to be too many. Not thread-safe: the engine holds its lock around each call."""

    def __init__(self, budget: int) -> None:
        """Begin with none.

        Args:
            budget: How many workers are replaced, one after another in the same place, until one builds a batch.
        """
        self._budget = budget
        self._in_a_row: dict[int, int] = {}
        """place -> deaths since its last batch"""
        self._by_batch: dict[Hashable, int] = {}
        """batch -> workers that died while building it"""

    @property
    def is_counting(self) -> bool:
        """Whether there were deaths since the last batch; until then, no batch need be noted."""
        return bool(self._in_a_row or self._by_batch)

    def note_batch(self, place: int, batch: Hashable) -> None:
        """Take note that a worker has built a batch."""
        self._in_a_row.pop(place, None)
        self._in_a_row.pop(TEMPLATE, None)
        self._by_batch.pop(batch, None)

    def forget_batches(self) -> None:
        """Blame no batch for what happened so far."""
        self._by_batch.clear()

    def note_death(self, place: int, batch: Hashable | None) -> Verdict:
        """Take note that a worker died, at this batch if any, and decide."""
        self._in_a_row[place] = self._in_a_row.get(place, 0) + 1
        if batch is not None:
            self._by_batch[batch] = self._by_batch.get(batch, 0) + 1
            if self._budget and self._by_batch[batch] >= MAX_DEATHS_BY_BATCH:
                return Verdict.BATCH_IS_TO_BLAME
        return Verdict.REPLACE if self._in_a_row[place] <= self._budget else Verdict.TOO_MANY

    def num_in_a_row(self, place: int) -> int:
        """Return how many workers have died in a place since a batch came from there."""
        return self._in_a_row.get(place, 0)

    def __repr__(self) -> str:
        return f"<Casualties {sum(self._in_a_row.values())} in a row, budget {self._budget}>"
