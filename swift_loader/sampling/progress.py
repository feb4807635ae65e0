"""How far the loop is in a pass. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound="Progress")


class Progress:
    """How far the loop is in one pass. It outlives the iterator, so a state can be had after the loop was left.

    What the loop has `got` counts at once: that is one store, so an exception comes before it or after it. What follows
    from it is done by `settle`, as the loop asks for more. Who wants to know it earlier asks the `present` one.
    """

    got: Any = None
    """What the loop has got last: a `Delivery` without its batch. Set to None, it doesn't count."""
    num_got = 0
    """How many batches the loop got here, as far as that is settled."""
    is_over = False
    """Whether the loop has met the end."""
    _counted: Any = None

    def settle(self) -> None:
        """Do what follows from what the loop has got. If an exception ends this, the next call does it again.

        Only the thread in whose turn the loop asks for more calls it, before anything is taken.
        """
        got = self.got
        if got is not self._counted:
            if got is not None:
                self._count(got)
                # No handler runs between these.
                self.num_got += got.is_batch
            self._counted = got

    def present(self: _Kind) -> _Kind:
        """Return this, settled: a copy, if it isn't. Any thread.

        The batch may be on its way to the loop still. If an exception of a signal handler ends that, it doesn't count.
        """
        if self.got is self._counted:
            return self
        twin = copy(self)
        twin._detach()  # noqa: SLF001 - of the same class
        twin.settle()
        return twin

    def _count(self, got: Any) -> None:
        """Count what the loop has got, a batch or the error in its place. Idempotent."""
        raise NotImplementedError

    def _detach(self) -> None:
        """Be the only one that has what `_count` changes."""


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

    def __len__(self) -> int:
        """How many steps are behind the loop."""
        return self.first + len(self.ahead)
