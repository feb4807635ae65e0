"""Copies batches to the device ahead of the loop. Runs in the loop's thread. Never blocks to get ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from swift_loader.delivery.delivery import Delivery
from swift_loader.device.copies import Copies, Issued
from swift_loader.device.transfer import Transfer
from swift_loader.interrupts import is_interrupt

__all__ = ["DirectSource", "MovingSource", "Source"]


class Source(Protocol):
    """Gives an epoch's batches one by one."""

    def take(self) -> Delivery:
        """Return the next batch of the epoch, or the error in its place.

        Don't call it after the last batch or an error.
        """
        ...


class DirectSource:
    """Batches as the engine delivers them."""

    def __init__(self, pull: Callable[[], Delivery]) -> None:
        self._pull = pull

    def take(self) -> Delivery:
        """Return the next batch. It belongs to the user from now on."""
        delivery = self._pull()
        delivery.keep()
        return delivery


class MovingSource:
    """Batches on the device, up to `depth` of them ahead of the loop's batch."""

    def __init__(
        self,
        pull: Callable[[], Delivery],
        is_ready: Callable[[], bool],
        move: Callable[[Delivery, Transfer], Any],
        copies: Copies,
        depth: int,
        num_batches: int,
    ) -> None:
        """Begin a pass.

        Args:
            pull: Returns the next batch on the host; may block.
            is_ready: Returns whether `pull` would return at once.
            move: Returns that batch on the device.
            copies: The running copies of all passes.
            depth: How many batches may be on the device ahead of the loop.
            num_batches: How many to pull.
        """
        self._pull = pull
        self._is_ready = is_ready
        self._move = move
        self._copies = copies
        self._depth = depth
        self._num_left = num_batches
        self._pulled: Delivery | None = None
        """A batch that isn't moved yet because of an interrupt."""
        self._ahead: deque[tuple[Delivery, Issued | None]] = deque()
        """An entry without copies holds an error. It is the last entry."""

    def take(self) -> Delivery:
        """Return the next batch, on the device, or the error in its place."""
        self._copies.begin_step()
        if not self._ahead:
            self._fetch()
        while len(self._ahead) <= self._depth and self._can_fetch():
            self._fetch()
        delivery, issued = self._ahead[0]
        if issued is None:
            return delivery
        self._copies.hand_over(issued)
        self._ahead.popleft()  # last: a Ctrl-C before it loses nothing
        return delivery

    def _can_fetch(self) -> bool:
        return self._pulled is not None or (self._num_left > 0 and self._is_ready())

    def _fetch(self) -> None:
        if self._pulled is None:
            self._pulled = self._pull()
            self._num_left -= 1
        pulled = self._pulled
        if pulled.error is None:
            try:
                issued = self._copies.issue(self._move, pulled, pulled.keep)
                self._ahead.append((replace(pulled, batch=issued.batch), issued))
            except Exception as error:
                if is_interrupt(error):
                    raise
                pulled = replace(pulled, batch=None, error=error)
        if pulled.error is not None:
            self._ahead.append((pulled, None))
            self._num_left = 0
        self._pulled = None  # not after an interrupt: the next call moves it
