"""How far the loop is in a pass. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Progress:
    """How far the loop is in one pass. It outlives the iterator, so a state can be had after the loop was left.

    What the loop has `got` counts at once: that is one store, so an exception comes before it or after it. What follows
    from it is done later, by `settle`.
    """

    got: Any = None
    """What the loop has got last: a `Delivery` without its batch. Set to None, it doesn't count."""
    num_got = 0
    """How many batches the loop got here, once what it got last is settled."""
    is_over = False
    """Whether the loop has met the end."""
    _counted: Any = None

    def settle(self) -> None:
        """Do what follows from what the loop has got. If an exception ends this, the next call does it again."""
        got = self.got
        if got is not self._counted:
            if got is not None:
                self._count(got)
                # No handler runs between these.
                self.num_got += got.is_batch
            self._counted = got

    def take_back(self, got: Any) -> None:
        """Take in that the loop hasn't got this. Idempotent."""
        self.got = None
        if self._counted is got:  # a signal handler has asked for the state
            self._uncount(got)
            self.num_got -= 1
            self._counted = None

    def _count(self, got: Any) -> None:
        """Count what the loop has got, a batch or the error in its place. Idempotent."""
        raise NotImplementedError

    def _uncount(self, got: Any) -> None:
        """Count it as not delivered. Idempotent."""


class Steps:
    """The steps of an epoch that are behind the loop: all before `first`, and some later ones, if they came earlier."""

    def __init__(self, first: int = 0, ahead: Iterable[int] = ()) -> None:
        self.first = first
        self.ahead = frozenset(ahead)

    def note(self, step: int) -> None:
        """Take a step as behind the loop. Idempotent."""
        first, ahead = self.first, self.ahead
        if step == first and not ahead:  # nearly always
            self.first = step + 1
        elif step >= first:
            ahead |= {step}
            while first in ahead:
                first += 1
            self.first, self.ahead = first, frozenset(one for one in ahead if one > first)  # no handler runs in here

    def discard(self, step: int) -> None:
        """Take a step as not behind the loop. Idempotent."""
        done = {*range(step, self.first), *self.ahead} - {step}
        self.first, self.ahead = min(step, self.first), frozenset(done)

    def __len__(self) -> int:
        """How many steps are behind the loop."""
        return self.first + len(self.ahead)
