"""Which sample a worker is at, for the trainer to look up when it hangs.

Telling the trainer sample by sample would cost more than many samples take. So the samples of all batches grow in one
list, whose length the interpreter keeps at a fixed address, and the trainer reads it there, in the worker's memory,
from outside. The layout of a list is private to CPython, and so it is looked at before it is relied upon.
"""

from __future__ import annotations

import ctypes
from typing import Any

from swift_loader.transport.board import NUM_LEFT_OUT, Board
from swift_loader.transport.messages import UNKNOWN_ADDRESS

__all__ = ["Locator"]

_IN_BULK = -1
"""Instead of a count of samples that were left out: all samples are asked for at once."""


class Locator:
    """The place of one worker in its batch. Written by the worker's thread, read from outside at any time."""

    def __init__(self, board: Board) -> None:
        self.samples: list[Any] = []
        """Of the batch that is being fetched; always the same list."""
        self._words = board.words

    def begin(self, *, in_bulk: bool) -> list[Any]:
        """Return the list, empty, for the samples of another batch."""
        self.samples.clear()
        self._words[NUM_LEFT_OUT] = _IN_BULK if in_bulk else 0
        return self.samples

    def fetch_one_by_one(self) -> None:
        """Take note that the samples are asked for one by one after all."""
        self._words[NUM_LEFT_OUT] = 0

    def leave_out(self) -> None:
        """Take note that the batch goes on without a sample."""
        self._words[NUM_LEFT_OUT] += 1

    def address(self) -> int:
        """Return where in this process's memory the length of the list is, in 64 bits."""
        address = id(self.samples) + object.__basicsize__
        length = ctypes.c_ssize_t.from_address(address)
        for _ in range(2):
            if length.value != len(self.samples):
                return UNKNOWN_ADDRESS
            self.samples.append(None)
        self.samples.clear()
        return address
