"""What a run leaves out: steps that the user skipped, and rows that no batch has from some position on. Pure.

Skipped steps are ranges of positions in an epoch's order, so they mean the same samples with any batch size and any
number of ranks. Excluded rows are dataset indices, which have other positions in each epoch. What is left of an epoch
is cut into steps as if the others weren't there:

    positions of the epoch     0 1 2 3 4 5 6 7 8 9        left out: [2, 4) and [7, 8)
    places in what is left     0 1     2 3 4   5 6

Both are in the state and go to the workers. The positions of excluded rows are computed once per epoch in each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.integers import Form, damaged, from_state, in_state, integer, to_state

Indices = NDArray[np.int64]

NO_INDICES = np.empty(0, np.int64)

BLOCK_INDICES = 2**20
"""So many dataset indices a user's function gets at once."""

SKIPPED, EXCLUDED = "skipped", "excluded"
"""Fields of a state."""

_PLACE = integer(0, 2**62 - 1)


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A position between two samples of a run. It is the same on all ranks, and independent of their batch size."""

    epoch: int = in_state(_PLACE)
    num_samples: int = in_state(_PLACE, "position")
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
    text: str
    """Ranges `begin:end` of dataset indices, in order, joined by commas. A state may be copied after each batch, and a
    string costs nothing then."""
    num_rows: int

    @classmethod
    def of(cls, since: Position, begins: Indices, ends: Indices) -> Exclusion:
        """Return the exclusion of ranges in any order, which may overlap."""
        begins, ends = _merged(begins, ends)
        text = ",".join(map("{}:{}".format, begins.tolist(), ends.tolist()))
        return cls(since, text, int((ends - begins).sum()))

    @property
    def rows(self) -> Indices:
        """The dataset indices, `(n,)`, sorted."""
        return (_rows_in if self.num_rows <= _MAX_KEPT else _rows_in.__wrapped__)(self.text)


_MAX_KEPT = 4096
"""Rows of an exclusion that are kept once they were read. Those of 1,024 exclusions take 32 MiB then."""


@lru_cache(maxsize=1024)  # a loop may exclude rows after each batch, and all of them count then
def _rows_in(text: str) -> Indices:
    begins, ends = np.fromstring(text.replace(":", ","), np.int64, sep=",").reshape(-1, 2).T
    lengths = ends - begins
    rows: Indices = np.repeat(ends - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
    return rows


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
        if not self.num_positions:
            return position
        index = int(np.searchsorted(self._begins, position))
        beyond = max(0, int(self._ends[index - 1]) - position) if index else 0
        return position - int(self._num_before[index]) + beyond

    def position_of(self, place: int) -> int:
        """Return the position at a place in what is left; at its end, the position after all gaps that end there."""
        if not self.num_positions:
            return place
        return place + int(self._num_before[np.searchsorted(self._first_places, place, side="right")])

    def positions_of(self, places: Indices) -> Indices:
        """Return the positions, `(n,) int64`, at several places in what is left."""
        if not self.num_positions:
            return places
        found: Indices = places + self._num_before[np.searchsorted(self._first_places, places, side="right")]
        return found


def _read_ranges(value: Any, num_columns: int = 3) -> Indices:
    """Return rows that end with `begin, end`, `(n, num_columns)`."""
    given = np.asarray(value)
    if given.shape == (0,):
        return NO_INDICES.reshape(0, num_columns)
    table: Indices = given.astype(np.int64)
    is_integer = given.dtype.kind in "iu"
    if not is_integer or table.shape[1:] != (num_columns,) or table.min() < 0 or (table[:, -2] >= table[:, -1]).any():
        raise ValueError
    return table


def _read_exclusion(value: Any) -> Exclusion:
    rows = np.array(value[2].replace(":", ",").split(","), np.int64)
    since = Position(*map(_PLACE.read, value[:2]))
    return Exclusion.of(since, *_read_ranges(rows.reshape(-1, 2), 2).T)


_RANGES = Form(
    "a list of ranges [epoch, begin, end] with begin < end",
    lambda value: [SkippedRange(*row) for row in _read_ranges(value).tolist()],
    lambda ranges: [[one.epoch, one.begin, one.end] for one in ranges],
)
_EXCLUSION = Form(
    "[epoch, position, 'begin:end,begin:end']",
    _read_exclusion,
    lambda one: [one.since.epoch, one.since.num_samples, one.text],
)


@dataclass(frozen=True, slots=True)
class Skips:
    """Everything that a run leaves out."""

    ranges: tuple[SkippedRange, ...] = in_state(_RANGES, SKIPPED, older=())
    """The skipped steps, in order. No two of them overlap or touch, so equal skips are equal values."""
    exclusions: tuple[Exclusion, ...] = in_state(_EXCLUSION.several(), EXCLUDED, older=())
    """In order. Each has other rows, and at least one."""
    gaps: dict[tuple[Any, int], Gaps] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What it leaves out, by order and epoch, as far as a plan has computed it."""

    def __reduce__(self) -> Any:
        return type(self), (self.ranges, self.exclusions)

    @property
    def last_epoch(self) -> int:
        """The last epoch that may have more or fewer samples left than all later ones; -1 if there is none."""
        epochs = [-1, *(one.epoch for one in self.ranges[-1:]), *(one.since.epoch for one in self.exclusions[-1:])]
        return max(epochs)

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
        before = [one for one in self.exclusions if one.since < since]
        here = [one.rows for one in self.exclusions if one.since == since]
        rows = np.setdiff1d(rows, np.concatenate([NO_INDICES, *(one.rows for one in before)]), assume_unique=True)
        held = {since: np.union1d(np.concatenate([NO_INDICES, *here]), rows)}
        held |= {one.since: np.setdiff1d(one.rows, rows) for one in self.exclusions if one.since > since}
        changed = (Exclusion.of(at, rows, rows + 1) for at, rows in held.items() if rows.size)
        return replace(self, exclusions=(*before, *changed))

    def cover(self, asked: SkippedRange) -> bool:
        """Return whether all positions of a range are in skipped steps."""
        return any(
            one.epoch == asked.epoch and one.begin <= asked.begin and asked.end <= one.end for one in self.ranges
        )

    def touch(self, asked: SkippedRange) -> bool:
        """Return whether any position of a range is in a skipped step."""
        return any(one.epoch == asked.epoch and one.begin < asked.end and asked.begin < one.end for one in self.ranges)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a state, as plain JSON types.

        `skipped` has `[epoch, begin, end]` of each range, `excluded` has `[epoch, position, rows]`, see `Exclusion`.
        """
        return to_state(self, {})

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], num_samples: int | None) -> Skips:
        """Return the skips of a saved state, from the fields that `to_dict` returned. `num_samples` is the state's.

        A checkpoint may have converted the integers and lists.
        """
        return from_state(cls, state).checked(num_samples)

    def checked(self, num_samples: int | None) -> Skips:
        """Return what a state has, in order. Raises `StateMismatch` if it is beyond the dataset's length."""
        ends = [one.end for one in self.ranges]
        ends += [end for one in self.exclusions for end in (one.since.num_samples, int(one.rows[-1]) + 1)]
        if ends and (num_samples is None or max(ends) > num_samples):
            raise damaged(
                f"the state leaves out samples up to {max(ends)}, which is beyond its num_samples={num_samples}"
            )
        skips = NO_SKIPS.added(self.ranges)
        for one in self.exclusions:
            skips = skips.excluding(one.since, one.rows)
        return skips


NO_SKIPS = Skips()


def rows_of(asked: Any, num_samples: int) -> Indices:
    """Return the dataset indices that the user asks for: `(n,)`, sorted, each once. See `SwiftLoader.exclude`."""
    if callable(asked):
        blocks = [range(num_samples)[begin : begin + BLOCK_INDICES] for begin in range(0, num_samples, BLOCK_INDICES)]
        return np.concatenate([NO_INDICES, *(_chosen(asked, np.arange(one.start, one.stop)) for one in blocks)])
    is_array = hasattr(asked, "__array__") or not isinstance(asked, Iterable)
    rows: NDArray[Any] = np.atleast_1d(asked if is_array else list(asked))
    if not rows.size:
        return NO_INDICES
    if rows.dtype.kind not in "iu":
        raise TypeError(f"the rows are {rows.dtype}; they must be integers, or a function of an array of indices")
    if rows.min() < 0 or rows.max() >= num_samples:
        raise ValueError(
            f"rows {rows.min()} to {rows.max()} aren't all in the dataset, whose last is {num_samples - 1}"
        )
    return np.unique(rows.astype(np.int64))


def _chosen(asked: Callable[[Indices], Any], indices: Indices) -> Indices:
    mask: NDArray[np.bool_] = np.asarray(asked(indices))
    if mask.dtype != np.bool_ or mask.shape != indices.shape:
        raise TypeError(
            f"the function that chooses rows returned {mask.dtype} of the shape {mask.shape}; it must return bools of "
            f"the shape {indices.shape}, one for each index"
        )
    return indices[mask]


def _merged(begins: Indices, ends: Indices) -> tuple[Indices, Indices]:
    """Return ranges in order, of which none overlap or touch."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    is_new = begins[1:] > ends[:-1]
    return np.append(begins[:1], begins[1:][is_new]), np.append(ends[:-1][is_new], ends[-1:])


NO_GAPS = Gaps(NO_INDICES, NO_INDICES)
