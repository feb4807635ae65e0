"""What a run leaves out: steps that the user skipped, and rows that no batch has from some position on. Pure.

Skipped steps are ranges of positions in an epoch's order, so they mean the same samples with any batch size and any
number of ranks. Excluded rows are dataset indices, which have other positions in each epoch. What is left of an epoch
is cut into steps as if the others weren't there:

    positions of the epoch     0 1 2 3 4 5 6 7 8 9        left out: [2, 4) and [7, 8)
    places in what is left     0 1     2 3 4   5 6

Both are in the state and go to the workers. The positions of excluded rows are computed once per epoch in each process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import StateMismatch
from swift_loader.sampling.integers import Form, as_integer, checked_fields, several, shown
from swift_loader.sampling.shuffle import Order

Indices = NDArray[np.int64]

NO_INDICES = np.empty(0, np.int64)

BLOCK_INDICES = 2**20
"""So many dataset indices a user's function gets at once."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A position between two samples of a run. It is the same on all ranks, and independent of their batch size."""

    epoch: int
    num_samples: int
    """Number of samples of the epoch's order before the position."""


@dataclass(frozen=True, slots=True, order=True)
class SkippedRange:
    """The positions `[begin, end)` of an epoch. Not empty."""

    epoch: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Rows that no batch has from a position on: in what is left of its epoch, and in all later epochs."""

    since: Position
    packed: bytes
    """`(n, 2) int64`: ranges `[begin, end)` of dataset indices, in order. Bytes can be compared, hashed and sent."""

    @classmethod
    def of(cls, since: Position, rows: Indices) -> Exclusion:
        """`rows`: `(n,)`, sorted, each once."""
        return cls(since, np.stack(_merged(rows, rows + 1), axis=1).tobytes())

    @property
    def ranges(self) -> Indices:
        """The ranges, `(n, 2)`."""
        return np.frombuffer(self.packed, np.int64).reshape(-1, 2)

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return int(np.diff(self.ranges).sum())

    @property
    def rows(self) -> Indices:
        """The dataset indices, `(n,)`, sorted."""
        begins, ends = self.ranges.T
        lengths = ends - begins
        return np.repeat(ends - np.cumsum(lengths), lengths) + np.arange(lengths.sum())


class Gaps:
    """The positions of one epoch that are left out, as arrays. Each call takes O(log) of their number."""

    def __init__(self, begins: Indices, ends: Indices) -> None:
        """Take ranges in any order, which may overlap."""
        self._begins, self._ends = _merged(begins, ends)
        self._num_before = np.concatenate([[0], np.cumsum(self._ends - self._begins)])
        self._first_places = self._begins - self._num_before[:-1]
        self.num_positions = int(self._num_before[-1])
        """How many positions are left out."""
        self.first_repeated = 0
        """The place from which padding is taken. What came before it may be excluded by now."""

    def place_of(self, position: int) -> int:
        """Return how many positions before this one aren't left out."""
        index = int(np.searchsorted(self._begins, position))
        beyond = max(0, int(self._ends[index - 1]) - position) if index else 0
        return position - int(self._num_before[index]) + beyond

    def position_of(self, place: int) -> int:
        """Return the position at a place in what is left; at its end, the position after all gaps that end there."""
        return place + int(self._num_before[np.searchsorted(self._first_places, place, side="right")])

    def positions_of(self, places: Indices) -> Indices:
        """Return the positions, `(n,) int64`, at several places in what is left."""
        if not self.num_positions:
            return places
        found: Indices = places + self._num_before[np.searchsorted(self._first_places, places, side="right")]
        return found


@dataclass(frozen=True, slots=True)
class Skips:
    """Everything that a run leaves out."""

    ranges: tuple[SkippedRange, ...] = ()
    """The skipped steps, in order. No two of them overlap or touch, so equal skips are equal values."""
    exclusions: tuple[Exclusion, ...] = ()
    """In order. Each has other rows, and at least one."""

    def __bool__(self) -> bool:
        return bool(self.ranges or self.exclusions)

    @property
    def last_epoch(self) -> int:
        """The last epoch that may have more or fewer samples left than all later ones; -1 if there is none."""
        epochs = [one.epoch for one in self.ranges[-1:]] + [one.since.epoch for one in self.exclusions[-1:]]
        return max(epochs, default=-1)

    @property
    def num_excluded(self) -> int:
        """How many rows all epochs after the last one leave out."""
        return sum(one.num_rows for one in self.exclusions)

    def added(self, more: Iterable[SkippedRange]) -> Skips:
        """Return these skips and more, which may overlap."""
        merged: list[SkippedRange] = []
        for one in sorted([*self.ranges, *more]):
            if merged and one.epoch == merged[-1].epoch and one.begin <= merged[-1].end:
                merged[-1] = SkippedRange(one.epoch, merged[-1].begin, max(one.end, merged[-1].end))
            else:
                merged.append(one)
        return replace(self, ranges=tuple(merged))

    def excluding(self, since: Position, rows: Indices) -> Skips:
        """Return these skips and rows from a position on, `(n,)`, sorted, each once. They may be excluded already."""
        held = {one.since: one.rows for one in self.exclusions}
        for at, others in held.items():
            if at <= since:
                rows = np.setdiff1d(rows, others, assume_unique=True)
            else:
                held[at] = np.setdiff1d(others, rows, assume_unique=True)
        held[since] = np.union1d(held.get(since, NO_INDICES), rows)
        return replace(self, exclusions=tuple(Exclusion.of(at, held[at]) for at in sorted(held) if held[at].size))

    def cover(self, asked: SkippedRange) -> bool:
        """Return whether all positions of a range are in skipped steps."""
        return any(
            one.epoch == asked.epoch and one.begin <= asked.begin and asked.end <= one.end for one in self.ranges
        )

    def touch(self, asked: SkippedRange) -> bool:
        """Return whether any position of a range is in a skipped step."""
        return any(one.epoch == asked.epoch and one.begin < asked.end and asked.begin < one.end for one in self.ranges)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a state, as plain JSON types: those that aren't empty.

        `skipped` has `[epoch, begin, end]` of each range, `excluded` has `[epoch, position, ranges of rows]`.
        """
        fields = {
            SKIPPED: [[one.epoch, one.begin, one.end] for one in self.ranges],
            EXCLUDED: [[one.since.epoch, one.since.num_samples, one.ranges.tolist()] for one in self.exclusions],
        }
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], num_samples: int | None) -> Skips:
        """Return the skips of a saved state, from the fields that `to_dict` returned. `num_samples` is the state's.

        A checkpoint may have converted the integers and lists.
        """
        given = state.get(SKIPPED, [])
        try:
            steps = [[-1 if (number := as_integer(field)) is None else number for field in row] for row in given]
        except TypeError:
            steps = [[]]
        is_other = isinstance(given, (str, bytes, Mapping))
        if is_other or any(len(row) != _NUM_FIELDS or min(row) < 0 or row[1] >= row[2] for row in steps):
            raise StateMismatch(
                f"the state's skipped={shown(given)} must be a list of ranges [epoch, begin, end] with begin < end; "
                f"pass the dict that state_dict() returned, unchanged"
            )
        skips = NO_SKIPS.added(SkippedRange(*row) for row in steps)
        excluded: list[Exclusion] = checked_fields({EXCLUDED: [], **state}, _EXCLUDED)[EXCLUDED]
        ends = [(f"skipped range {row}", row[2]) for row in steps]
        ends += [
            (
                f"excluded={shown(state[EXCLUDED])[:_MAX_SHOWN_CHARS]}",
                max(one.since.num_samples, int(one.ranges[-1, 1])),
            )
            for one in excluded
        ]
        for what, end in ends:
            if num_samples is None or end > num_samples:
                raise StateMismatch(
                    f"the state's {what} ends beyond its num_samples={num_samples}; pass the dict that state_dict() "
                    f"returned, unchanged"
                )
        for one in excluded:
            skips = skips.excluding(one.since, one.rows)
        return skips


NO_SKIPS = Skips()
SKIPPED, EXCLUDED = "skipped", "excluded"
"""The fields of a state. A run that leaves out nothing doesn't have them."""
_NUM_FIELDS = 3
_MAX_SHOWN_CHARS = 100


def _read_exclusion(value: Any) -> Exclusion:
    epoch, position, ranges = value
    since, array = Position(operator.index(epoch), operator.index(position)), np.asarray(ranges)
    if array.dtype.kind not in "iu" or array.shape[1:] != (2,) or min(since.epoch, since.num_samples, array.min()) < 0:
        raise ValueError
    begins, ends = array.astype(np.int64).T
    if (begins >= ends).any():
        raise ValueError
    return Exclusion(since, np.stack(_merged(begins, ends), axis=1).tobytes())


_EXCLUDED = {EXCLUDED: several(Form("[epoch, position, [[begin, end], ...]] with begin < end", _read_exclusion))}


@lru_cache(maxsize=2)
def gaps_of(skips: Skips, order: Order, epoch: int) -> Gaps:
    """Return the positions of an epoch that are left out. The last ones are remembered."""
    steps = [(one.begin, one.end) for one in skips.ranges if one.epoch == epoch]
    exclusions = [one for one in skips.exclusions if one.since.epoch <= epoch]
    rows = [one.rows for one in exclusions]
    floors = [one.since.num_samples if one.since.epoch == epoch else 0 for one in exclusions]
    found = order.positions(epoch, np.concatenate([NO_INDICES, *rows]))
    found = found[found >= np.repeat(np.array(floors, np.int64), [one.size for one in rows])]
    begins, ends = np.array(steps, np.int64).reshape(-1, 2).T
    gaps = Gaps(np.concatenate([begins, found]), np.concatenate([ends, found + 1]))
    places = [gaps.place_of(floor) for floor in floors]
    gaps.first_repeated = max((one for one in places if one < order.num_samples - gaps.num_positions), default=0)
    return gaps


def rows_of(asked: Any, num_samples: int) -> Indices:
    """Return the dataset indices that the user asks for: `(n,)`, sorted, each once. See `SwiftLoader.exclude`."""
    if callable(asked):
        return np.concatenate([NO_INDICES, *_chosen(asked, num_samples)])
    if as_integer(asked) is not None:
        asked = [asked]
    if isinstance(asked, (str, bytes, Mapping)) or not isinstance(asked, Iterable):
        raise TypeError(
            f"rows={shown(asked)} is a {type(asked).__name__}; it must be a dataset index, several of them, or a "
            f"function that takes an array of indices and returns an array of bools"
        )
    rows = np.asarray(asked if hasattr(asked, "__array__") else list(asked))
    if not rows.size:
        return NO_INDICES
    if rows.dtype.kind not in "iu":
        raise TypeError(
            f"the rows are of type {rows.dtype}; they must be integers from 0 to {num_samples - 1}. For a mask of "
            f"bools, give numpy.flatnonzero(mask)"
        )
    outside = rows[(rows < 0) | (rows >= num_samples)]
    if outside.size:
        raise ValueError(f"row {outside[0]} isn't in the dataset; its rows are 0 to {num_samples - 1}")
    return np.unique(rows.astype(np.int64))


def _chosen(asked: Callable[[Indices], Any], num_samples: int) -> Iterator[Indices]:
    for begin in range(0, num_samples, BLOCK_INDICES):
        indices = np.arange(begin, min(begin + BLOCK_INDICES, num_samples))
        mask = np.asarray(asked(indices))
        if mask.dtype != np.bool_ or mask.shape != indices.shape:
            raise TypeError(
                f"the function that chooses rows returned an array of {mask.dtype} of the shape {mask.shape} for "
                f"{len(indices)} indices; it must return a bool for each index: the shape {indices.shape}"
            )
        yield begin + np.flatnonzero(mask)


def _merged(begins: Indices, ends: Indices) -> tuple[Indices, Indices]:
    """Return ranges in order, of which none overlap or touch."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    is_new = begins[1:] > ends[:-1]
    return np.append(begins[:1], begins[1:][is_new]), np.append(ends[:-1][is_new], ends[-1:])


NO_GAPS = Gaps(NO_INDICES, NO_INDICES)
