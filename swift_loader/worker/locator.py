"""Which sample a worker is at, for the trainer to look up in the worker's memory when it hangs.

Telling the trainer sample by sample would cost more than many samples take. So the samples of all batches grow in one
list, whose length the interpreter keeps at a fixed address, and the trainer reads it there, from outside. The layout of
a list is private to CPython, and so it is looked at before it is relied upon.
"""

from __future__ import annotations

import ctypes
from typing import Any

from swift_loader.transport.messages import UNKNOWN_ADDRESS, Ready

__all__ = ["Locator"]

IN_BULK = -1
"""Instead of a count of samples that were left out: all samples are asked for at once."""


class Locator:
    """The place of one worker in its batch. Written by the worker's thread, read from outside at any time."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        """Of the batch that is being fetched; always the same list."""
        self._num_left_out = ctypes.c_int64(IN_BULK)

    def begin(self, *, in_bulk: bool) -> list[Any]:
        """Return the list, empty, for the samples of another batch."""
        self.samples.clear()
        self._num_left_out.value = IN_BULK if in_bulk else 0
        return self.samples

    def fetch_one_by_one(self) -> None:
        """Take note that the samples are asked for one by one after all."""
        self._num_left_out.value = 0

    def leave_out(self) -> None:
        """Take note that the batch goes on without a sample."""
        self._num_left_out.value += 1

    def ready(self) -> Ready:
        """Return the message that says where to look."""
        address = id(self.samples) + object.__basicsize__
        length = ctypes.c_ssize_t.from_address(address)
        for _ in range(2):
            if length.value != len(self.samples):
                return Ready(UNKNOWN_ADDRESS, UNKNOWN_ADDRESS)
            self.samples.append(None)
        self.samples.clear()
        return Ready(address, ctypes.addressof(self._num_left_out))
