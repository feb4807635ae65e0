"""The parts of epochs that a run leaves out, as ranges of positions. Pure.

A range counts positions of its epoch's whole order, so it means the same samples with any batch size and any number of
ranks. What is left of an epoch is cut into steps as if the skipped samples weren't there:

    positions of the epoch     0 1 2 3 4 5 6 7 8 9        skipped: [2, 4) and [7, 8)
    places in what is left     0 1     2 3 4   5 6
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import StateMismatch
from swift_loader.integers import as_integer, shown

__all__ = ["NO_SKIPS", "SkippedRange", "Skips"]

_NUM_FIELDS = 3


@dataclass(frozen=True, slots=True, order=True)
class SkippedRange:
    """The positions `[begin, end)` of an epoch. Not empty."""

    epoch: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Skips:
    """All skipped ranges of a run."""

    ranges: tuple[SkippedRange, ...] = ()
    """In order. No two of them overlap or touch, so equal skips are equal values."""

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @property
    def last_epoch(self) -> int:
        """The last epoch of which anything is skipped; -1 if there is none."""
        return self.ranges[-1].epoch if self.ranges else -1

    def added(self, more: Iterable[SkippedRange]) -> Skips:
        """Return these skips and more, which may overlap."""
        merged: list[SkippedRange] = []
        for one in sorted([*self.ranges, *more]):
            if merged and one.epoch == merged[-1].epoch and one.begin <= merged[-1].end:
                merged[-1] = SkippedRange(one.epoch, merged[-1].begin, max(one.end, merged[-1].end))
            else:
                merged.append(one)
        return Skips(tuple(merged))

    def cover(self, asked: SkippedRange) -> bool:
        """Return whether all positions of a range are skipped."""
        return any(one.begin <= asked.begin and asked.end <= one.end for one in self._of(asked.epoch))

    def touch(self, asked: SkippedRange) -> bool:
        """Return whether any position of a range is skipped."""
        return any(one.begin < asked.end and asked.begin < one.end for one in self._of(asked.epoch))

    def num_samples(self, epoch: int) -> int:
        """Return how many positions of an epoch are skipped."""
        return sum(one.end - one.begin for one in self._of(epoch))

    def place_of(self, epoch: int, position: int) -> int:
        """Return how many positions before this one aren't skipped."""
        return position - sum(min(one.end, position) - one.begin for one in self._of(epoch) if one.begin < position)

    def position_of(self, epoch: int, place: int) -> int:
        """Return the position at a place in what is left; at its end, the position after all skips that end there."""
        for one in self._of(epoch):
            if place < one.begin:
                break
            place += one.end - one.begin
        return place

    def positions_of(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions, `(n,) int64`, at several places in what is left."""
        ranges = self._of(epoch)
        if not ranges:
            return places
        num_skipped = np.cumsum([0] + [one.end - one.begin for one in ranges])
        first_places = np.array([one.begin for one in ranges]) - num_skipped[:-1]
        found: NDArray[np.int64] = places + num_skipped[np.searchsorted(first_places, places, side="right")]
        return found

    def to_list(self) -> list[list[int]]:
        """Return the skips as plain JSON types: `[epoch, begin, end]` of each range."""
        return [[one.epoch, one.begin, one.end] for one in self.ranges]

    @classmethod
    def from_list(cls, value: Any, num_samples: int | None) -> Skips:
        """Return the skips of a saved state.

        Args:
            value: What `to_list` returned. A checkpoint may have converted its integers and lists.
            num_samples: The state's length of the dataset.

        Raises:
            StateMismatch: The value isn't a list of such ranges, or one of them is beyond the dataset's length.
        """
        return NO_SKIPS.added(_checked_range(one, num_samples) for one in _items(value))

    def _of(self, epoch: int) -> tuple[SkippedRange, ...]:
        return tuple(one for one in self.ranges if one.epoch == epoch) if self.ranges else ()


NO_SKIPS = Skips()


def _items(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise _not_ranges(value)
    try:
        return list(value)
    except TypeError as error:
        raise _not_ranges(value) from error


def _checked_range(value: Any, num_samples: int | None) -> SkippedRange:
    fields = [number for number in map(as_integer, _items(value)) if number is not None]
    if len(fields) != _NUM_FIELDS or len(_items(value)) != _NUM_FIELDS:
        raise _not_ranges(value)
    found = SkippedRange(*fields)
    if found.epoch < 0 or not 0 <= found.begin < found.end:
        raise _not_ranges(value)
    if num_samples is None or found.end > num_samples:
        raise StateMismatch(
            f"the state's skipped range {shown(value)} ends beyond its num_samples={num_samples}; pass the dict that "
            f"state_dict() returned, unchanged"
        )
    return found


def _not_ranges(value: Any) -> StateMismatch:
    return StateMismatch(
        f"the state's skipped={shown(value)} must be a list of ranges [epoch, begin, end] with begin < end; pass the "
        f"dict that state_dict() returned, unchanged"
    )
