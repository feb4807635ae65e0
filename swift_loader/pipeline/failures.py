"""What becomes of an item whose function raised."""

from __future__ import annotations

from dataclasses import dataclass, field

from swift_loader.errors import RemoteTraceback, TooManyErrors

MAX_KEPT = 100
"""How many failures of a stage are kept for the report."""


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """An item that was left out."""

    stage: str
    item: int
    """The number of the item among those of its stage, from 0. In completion order, among its results."""
    exception: BaseException


@dataclass(slots=True)
class FailurePolicy:
    """Decides about the failures of one stage, and counts them. One thread uses it."""

    stage: str
    skips: bool
    """False: the first failure ends the run."""
    max_errors: int | None = None
    """How many items may be left out; None: any number."""
    num_failures: int = 0
    kept: list[ItemFailure] = field(default_factory=list)
    """The first of them."""

    def note(self, item: int, error: BaseException) -> None:
        """Record that an item failed. Returns if it is left out.

        Raises the item's error if none may fail, `TooManyErrors` if too many have failed.
        """
        raised = explained(error, place_of(self.stage, item))
        if not self.skips or not isinstance(error, Exception):
            raise raised
        self.num_failures += 1
        if len(self.kept) < MAX_KEPT:
            self.kept.append(ItemFailure(self.stage, item, error))
        if self.max_errors is not None and self.num_failures > self.max_errors:
            raise TooManyErrors(
                f"{self.num_failures} items failed in stage {self.stage!r}, more than max_errors={self.max_errors}; "
                f"the last one is item {item}"
            ) from raised


def place_of(stage: str, item: int) -> str:
    """Return the first line of the cause of an item's error."""
    return f"In stage {stage!r}, at item {item}"


def explained(error: BaseException, where: str) -> BaseException:
    """Return the error, with the place at the end of its chain of causes."""
    if isinstance(error, StopIteration):  # it would end the loop early
        stop, error = error, RuntimeError("the function of a stage raised StopIteration")
        error.__cause__ = stop
    last, seen = error, {id(error)}
    while last.__cause__ is not None and id(last.__cause__) not in seen:  # `raise error from error` is a circle
        last = last.__cause__
        seen.add(id(last))
    last.__cause__ = RemoteTraceback(where)
    return error
