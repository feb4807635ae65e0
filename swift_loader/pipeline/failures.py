"""What becomes of an item whose function raised."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field

from swift_loader.errors import RemoteTraceback, TooManyErrors, warn
from swift_loader.pipeline.items import Place

MAX_KEPT = 100
"""How many failures of a stage are kept for the report. If more than half of as many first items fail, all may."""


MIN_ITEMS = 100
"""Before the end of a pass, a share counts as if there were at least so many items."""


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """An item that was left out."""

    stage: str
    item: int
    """The number of the item among those of its stage, from 0. In completion order, among its results."""
    exception: BaseException
    """Without its frames, which would keep what their variables hold."""
    traceback: str


@dataclass(slots=True)
class FailurePolicy:
    """Decides about the failures of one stage, and counts them. One thread uses it."""

    stage: str
    skips: bool
    """False: the first failure ends the run."""
    max_errors: float | None = None
    """How many items may be left out; below 1: which share of them; None: any number."""
    of_all: Sequence[FailurePolicy] = ()
    """Those of all stages of the run."""
    max_of_all: float | None = None
    """How many items all of them may leave out."""
    num_before: int = 0
    """How many were left out before the run was resumed."""
    first_epoch: int = 0
    """The number of the run's first one."""
    places: list[Place] | None = field(default_factory=list)
    """Where a run continues after each item that was left out, if their number is limited. None: they aren't kept."""
    epoch: int = 0
    """Which one of the run's it is. All stages count them alike; a later stage meets them later."""
    seen: Counter[int] = field(default_factory=Counter)
    """By epoch: how many items gave results or failed."""
    failed: Counter[int] = field(default_factory=Counter)
    """By epoch: how many were left out."""
    kept: list[ItemFailure] = field(default_factory=list)
    """The first of the run."""
    _first: ItemFailure | None = None
    """Of the epoch."""
    _last: tuple[int, BaseException] = -1, StopIteration()
    """The item that failed last, and its error."""
    _has_warned: bool = False

    def note(self, item: int, error: BaseException, after: Place) -> None:
        """Record that an item failed. Returns if it is left out. `after`: its place.

        Raises the item's error if none may fail, `TooManyErrors` if too many have failed.
        """
        raised = explained(error, place_of(self.stage, item))
        if not self.skips or isinstance(error, BrokenExecutor) or not isinstance(error, Exception):
            raise raised
        self.failed[self.epoch] += 1
        if self.places is not None and max(self.max_errors or 0, self.max_of_all or 0) >= 1:
            self.places.append(after)
        self._last = item, raised
        self._check(MIN_ITEMS)
        without_frames(raised)
        if self._first is None or len(self.kept) < MAX_KEPT:
            failure = ItemFailure(self.stage, item, error, "".join(traceback.format_exception(error)))
            self._first = self._first or failure
            self.kept += [failure] if len(self.kept) < MAX_KEPT else []
        num, num_items = self.failed[self.epoch], self.seen[self.epoch]
        if num > MAX_KEPT // 2 and num_items <= MAX_KEPT and not self._has_warned:
            self._has_warned = True
            warn(f"{num} of {num_items} items failed in stage {self.stage!r}. The first:\n{self._first.traceback}")

    def _check(self, min_items: int) -> None:
        """Raise `TooManyErrors` if too many items were left out. A share is one of at least `min_items`."""
        item, raised = self._last
        limits = (self.max_errors, [self], f"stage {self.stage!r}"), (self.max_of_all, self.of_all, "all stages")
        for limit, policies, where in limits:
            is_share = isinstance(limit, float)
            num = sum(one.failed[self.epoch] + (0 if is_share else one.num_before) for one in policies)
            num_items = max(min_items, *(one.seen[self.epoch] for one in policies)) if is_share else 0
            if limit is not None and num > (limit * num_items if is_share else limit):
                raise TooManyErrors(
                    f"{num}{f' of {num_items}' if is_share else ''} items failed in {where}, more than "
                    f"max_errors={limit}; the last one is item {item} of stage {self.stage!r}"
                ) from raised

    def num_at(self, place: Place) -> int:
        """Return how many items were left out that a run doesn't meet again if it continues at this place."""
        return self.num_before + sum(after <= place[: len(after)] for after in self.places or ())

    def end(self) -> None:
        """Sum up an epoch, if items were left out, and begin the next one."""
        num, num_items, first = self.failed[self.epoch], self.seen[self.epoch], self._first
        if first is not None:
            self._check(0)
            what = first.traceback if num == num_items and not self._has_warned else f"{first.exception!r}"
            warn(
                f"{num} of {num_items} items failed in stage {self.stage!r} in epoch {self.first_epoch + self.epoch}, "
                f"and were left out. The first, item {first.item}: {what}"
            )
        self.epoch, self._first = self.epoch + 1, None


def without_frames(error: BaseException) -> BaseException:
    """Return the error. Its frames, and those of what led to it, are gone."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [inner for inner in (one.__cause__, one.__context__) if inner is not None]
    return error


class _Place(RemoteTraceback):
    """Where an error came from, in the chain of its causes."""

    @property
    def stage(self) -> str:
        """The beginning of the text, which names the stage."""
        return self.text.partition(", at item")[0]


def place_of(stage: str, item: int) -> str:
    """Return the first line of the cause of an item's error."""
    return f"In stage {stage!r}, at item {item}"


def explained(error: BaseException, where: str) -> BaseException:
    """Return the error, with the place at the end of its chain of causes."""
    if isinstance(error, StopIteration):  # it would end the loop early
        stop, error = error, RuntimeError("the function of a stage raised StopIteration")
        error.__cause__ = stop
    place = _Place(where)
    last, seen = error, {id(error)}
    while (cause := last.__cause__) is not None and id(cause) not in seen:  # `raise error from error` is a circle
        if isinstance(cause, _Place) and cause.stage == place.stage:  # the same error was raised for another item
            place.__cause__ = cause.__cause__
            break
        last = cause
        seen.add(id(last))
    if cause is None and not last.__suppress_context__:
        place.__cause__ = last.__context__  # else it would not be shown
    last.__cause__ = place
    return error
