"""Counts which batch of which epoch the loop gets next. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from swift_loader.sampling.plan import Plan


class Cursor:
    """A position in a plan: an epoch, and how many of its batches are behind the loop."""

    def __init__(self, plan: Plan, epoch: int, step: int, *, in_order: bool, is_endless: bool = False) -> None:
        """Begin at a step of an epoch, with all earlier steps behind the loop.

        `is_endless`: the plan doesn't know how many batches an epoch has.
        """
        self.plan = plan
        self.is_endless = is_endless
        self._count: Callable[[int], float] = (lambda _: math.inf) if is_endless else plan.num_batches
        """Returns how many batches an epoch has."""
        self._in_order = in_order
        self.num_delivered = 0
        """Since the beginning here."""
        self._epoch = epoch
        self._num_before = step
        self._num_batches = self._count(epoch)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the next batch. In completion order, it only tells how many batches were delivered."""
        return (self._epoch + 1, 0) if self.is_between_epochs else (self._epoch, self._num_before)

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last batch of the epoch was delivered. Cheap, because it is asked after each batch."""
        return self._num_before >= self._num_batches

    def is_at(self, epoch: int, step: int) -> bool:
        """Return whether exactly the batches before this one were delivered. Out of order, a count can't tell."""
        is_prefix = self._in_order or not self.num_delivered or step == 0
        return is_prefix and self.position == (epoch, step)

    def advance(self, epoch: int, step: int) -> int:
        """Record a batch. Return how many batches of its epoch were delivered before it.

        In order, that is its step. So the loop notices a batch that was lost before it was recorded here. Of an endless
        plan, it is how many were delivered since the beginning here.
        """
        if epoch != self._epoch:
            self._epoch, self._num_before, self._num_batches = epoch, 0, self._count(epoch)
        self._num_before += 1
        self.num_delivered += 1
        if self.is_endless:
            return self.num_delivered - 1
        return step if self._in_order else self._num_before - 1

    def __repr__(self) -> str:
        return f"<Cursor at batch {self._num_before} of epoch {self._epoch}>"
