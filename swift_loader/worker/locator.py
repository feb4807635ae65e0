"""Shows which sample a worker is fetching, so that the trainer can find out if the worker hangs.

A message per sample would take longer than many samples do. So the worker collects the samples of each batch in the
same list. CPython keeps the list's length at a fixed address, and the trainer reads it there, in the worker's memory.
The layout of a list is private to CPython, so it is checked first.
"""

from __future__ import annotations

import ctypes
from typing import Any

from swift_loader.transport.board import NUM_LEFT_OUT, Board
from swift_loader.transport.messages import UNKNOWN_ADDRESS

__all__ = ["Locator"]

_IN_BULK = -1
"""Written in place of the count of left-out samples while `__getitems__` fetches all samples at once."""


class Locator:
    """A worker's position in its batch. The worker's thread writes it; the trainer may read it at any time."""

    def __init__(self, board: Board) -> None:
        self.samples: list[Any] = []
        """The samples of the batch that is being fetched. Always the same list."""
        self._words = board.words

    def begin(self, *, in_bulk: bool) -> list[Any]:
        """Clear the list and return it, for the samples of the next batch."""
        self.samples.clear()
        self._words[NUM_LEFT_OUT] = _IN_BULK if in_bulk else 0
        return self.samples

    def fetch_one_by_one(self) -> None:
        """Record that the samples are fetched one by one from now on."""
        self._words[NUM_LEFT_OUT] = 0

    def leave_out(self) -> None:
        """Record that a sample was left out of the batch."""
        self._words[NUM_LEFT_OUT] += 1

    def address(self) -> int:
        """Return the address of the list's length (64 bits); `UNKNOWN_ADDRESS` if it isn't where it is expected."""
        address = id(self.samples) + object.__basicsize__
        length = ctypes.c_ssize_t.from_address(address)
        for _ in range(2):
            if length.value != len(self.samples):
                return UNKNOWN_ADDRESS
            self.samples.append(None)
        self.samples.clear()
        return address
