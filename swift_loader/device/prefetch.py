"""Copies batches to the device ahead of the loop. Runs in the loop's thread.

    HostSource ──pull──► batch on the host ──move──► ahead, `depth` of them ──take──► the loop

Nothing is lost if a Ctrl-C comes at any point: a batch that was pulled stays until it is moved, and a moved one until
it is taken.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from swift_loader.device.in_flight import CopiesInFlight, Issued
from swift_loader.device.transfer import Transfer
from swift_loader.interrupts import is_interrupt
from swift_loader.scheduler.delivery import Delivery


class HostSource(Protocol):
    """Gives batches on the host, and moves them."""

    def is_ready(self) -> bool:
        """Return whether to pull a batch ahead of the loop now."""
        ...

    def pull(self) -> Delivery:
        """Return the next batch on the host, or the error or the end in its place. May block.

        What it raises comes out of `take`, and the next `take` pulls again.
        """
        ...

    def move(self, delivery: Delivery, transfer: Transfer, /) -> Any:
        """Return a pulled batch on the device. What it raises is the error in place of the batch."""
        ...


class PrefetchQueue:
    """The batches of a pass that were moved and not taken yet. An error or the end stays at the front."""

    def __init__(self, source: HostSource, copies: CopiesInFlight, depth: int, num_batches: int = sys.maxsize) -> None:
        """Begin a pass. Its copies come after the work that the loop has queued so far.

        `copies`: the running ones of all passes. `depth`: batches that may be on the device ahead of the loop.
        `num_batches`: how many to pull at most.
        """
        self._source = source
        self._copies = copies
        self._depth = depth
        self._num_left = num_batches
        self._pulled: Delivery | None = None
        """A batch that isn't moved yet because of an interrupt."""
        self._ahead: deque[tuple[Delivery, Issued | None]] = deque()
        """An entry without copies holds an error or the end. It is the last entry."""
        copies.catch_up()

    def take(self) -> Delivery:
        """Return the next batch, on the device, or the error or the end in its place."""
        self._copies.begin_step()
        while len(self._ahead) <= self._depth and (  # only the first pull may block
            not self._ahead or self._pulled is not None or (self._num_left > 0 and self._source.is_ready())
        ):
            self._fetch()
        delivery, issued = self._ahead[0]
        if issued is None:
            return delivery
        self._copies.hand_over(issued)
        self._ahead.popleft()  # last: a Ctrl-C before it loses nothing
        return delivery

    @property
    def is_over(self) -> bool:
        """Whether no batch is left to take."""
        return bool(self._ahead) and self._ahead[0][1] is None

    def abandon(self, error: Exception) -> None:
        """Drop the batches. Each later `take` returns this error."""
        self._pulled, self._num_left = None, 0
        self._ahead.clear()
        self._ahead.append((Delivery(error=error), None))

    def _fetch(self) -> None:
        if self._pulled is None:
            self._pulled = self._source.pull()
            self._num_left -= 1
        pulled = self._pulled
        if pulled.error is None:
            try:
                issued = self._copies.issue(self._source.move, pulled, pulled.keep)
                # `pulled` stays with the copy, which reads its batch.
                moved = Delivery(
                    pulled.work, batch=issued.batch, failures=pulled.failures, num_before=pulled.num_before
                )
                self._ahead.append((moved, issued))
            except Exception as error:
                if is_interrupt(error):
                    raise
                pulled.batch, pulled.error = None, error
        if pulled.error is not None:
            self._ahead.append((pulled, None))
            self._num_left = 0
        self._pulled = None  # not after an interrupt: the next call moves it

    def __repr__(self) -> str:
        return f"{len(self._ahead)} ahead"


class LazyPass:
    """An iterator that begins its pass with the first `next`. If that raises, the second one tries again."""

    def __init__(self, begin: Callable[[], Callable[[], Any]]) -> None:
        """`begin` begins the pass, and returns the function that returns its next batch."""
        self._begin = begin
        self._take: Callable[[], Any] | None = None

    def __iter__(self) -> LazyPass:
        return self

    def __next__(self) -> Any:
        if self._take is None:
            self._take = self._begin()
        return self._take()
