"""Keeps some batches on the device ahead of the loop. Runs in the loop's thread, and never waits to get ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from swift_loader.device.copies import Copies
from swift_loader.device.streams import Event
from swift_loader.engine.base import Delivery

__all__ = ["DirectSource", "MovingSource", "Source"]


class Source(Protocol):
    """Where an epoch's batches come from, one by one."""

    def take(self) -> Delivery:
        """Return the next batch of the epoch, or why there is none; not to be called beyond its end or an error."""
        ...


class DirectSource:
    """Batches as the engine delivers them."""

    def __init__(self, pull: Callable[[], Delivery]) -> None:
        self.take = pull


class MovingSource:
    """Batches on the device, up to `depth` of them ahead of the one that was asked for."""

    def __init__(
        self,
        pull: Callable[[], Delivery],
        is_ready: Callable[[], bool],
        move: Callable[[Delivery], Any],
        copies: Copies,
        depth: int,
        num_batches: int,
    ) -> None:
        """Begin a pass.

        Args:
            pull: Returns the next batch on the host; may block.
            is_ready: Whether it would return at once.
            move: Returns that batch on the device.
            copies: Those under way, of all passes.
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
        """What a Ctrl-C kept from being moved."""
        self._ahead: deque[tuple[Delivery, Event | None]] = deque()
        """Without an event: why there is no batch, which is the last entry."""

    def take(self) -> Delivery:
        """Return the next batch, on the device; an error comes where its batch would have come."""
        self._copies.let_go()
        if not self._ahead:
            self._fetch()
        while len(self._ahead) <= self._depth and self._can_fetch():
            self._fetch()
        delivery, event = self._ahead[0]
        if event is None:
            return delivery
        self._copies.hand_over(delivery.batch, event)
        self._ahead.popleft()  # last: a Ctrl-C before it loses nothing
        return delivery

    def _can_fetch(self) -> bool:
        return self._pulled is not None or (self._num_left > 0 and self._is_ready())

    def _fetch(self) -> None:
        if self._pulled is None:
            self._pulled = self._pull()
            self._num_left -= 1
        entry, interrupt = self._moved(self._pulled)
        if entry[1] is None:
            self._num_left = 0
        self._ahead.append(entry)
        self._pulled = None  # not after a Ctrl-C: then it is moved next time
        if interrupt is not None:
            raise interrupt

    def _moved(self, pulled: Delivery) -> tuple[tuple[Delivery, Event | None], Exception | None]:
        """Return a batch on the device, or why there is none; and what is to be raised now although there is one."""
        first: Exception | None = None
        while pulled.error is None:
            try:
                moved, event = self._copies.issue(self._move, pulled)
                return (replace(pulled, batch=moved), event), first
            except Exception as error:
                # What the handler of a signal raises can't be told from what the move raises. But that happens again.
                if first is not None or threading.current_thread() is not threading.main_thread():
                    pulled = replace(pulled, batch=None, error=first or error)
                first = error
        return (pulled, None), None
