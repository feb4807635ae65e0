"""Checks the steps that a DataLoader is to leave out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from swift_loader.checks import check_integer
from swift_loader.integers import as_integer

__all__ = ["check_ahead", "checked_steps", "no_steps"]


def checked_steps(steps: Any, num_steps: int = -1) -> set[int]:
    """Return steps as integers.

    Args:
        steps: One step, or several.
        num_steps: Of the epoch; -1 if it isn't known.

    Raises:
        TypeError: A step isn't an integer.
        ValueError: The epoch has no such step.
    """
    if as_integer(steps) is None and not isinstance(steps, Iterable):
        raise TypeError(f"steps={steps!r} is a {type(steps).__name__}; it must be an integer, or several of them")
    several = [steps] if as_integer(steps) is not None else steps
    checked = set()
    for step in several:
        number = check_integer("step", step, 0)
        if 0 <= num_steps <= number:
            raise ValueError(f"step {number} can't be skipped: the epoch has {num_steps} steps, which count from 0")
        checked.add(number)
    return checked


def check_ahead(steps: Collection[int], num_done: int, done_ahead: Collection[int]) -> None:
    """Raise if one of the steps is behind the loop."""
    behind = sorted(step for step in steps if step < num_done or step in done_ahead)
    if behind:
        raise ValueError(
            f"step {behind[0]} can't be skipped: the loop is beyond it. Skip later steps, or load an earlier state"
        )


def no_steps(steps: Iterable[int]) -> ValueError:
    """Return the error for steps of a stream."""
    return ValueError(
        f"steps {sorted(steps)} can't be skipped: the dataset is an IterableDataset, whose batches are known only when "
        f"they come. Leave the bad samples out in the dataset"
    )
