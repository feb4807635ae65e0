"""What a worker shows of its progress. The trainer reads it at any time, and no message is needed.

Two counts are in a page of shared memory, so the trainer can read them after the worker's death, too. Only the worker
writes to it, with plain stores of aligned words.

The number of fetched samples isn't in the page: counting each sample would take longer than many samples do. The worker
collects the samples of each batch in the same list. CPython keeps the list's length at a fixed address, and the trainer
reads it there, in the worker's memory. The layout of a list is private to CPython, so it is checked first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from array import array
from collections.abc import Callable
from typing import Any

from swift_loader.transport.segments import Segment

NUM_BEGUN = 0
"""Index of the word that counts the tasks that the worker has started."""

NUM_LEFT_OUT = 1
"""Index of the word that counts the samples left out of the current batch."""

_NUM_WORDS = 2
"""64 bits each."""

_IN_BULK = -1
"""Written in place of the count of left-out samples while `__getitems__` fetches all samples at once."""

UNKNOWN_ADDRESS = 0
"""The address of a word in a worker's memory that the trainer can't read."""


class CounterWriter:
    """The worker's side. The thread that builds batches writes it."""

    def __init__(self) -> None:
        """Count on the heap, for this process alone."""
        self.samples: list[Any] = []
        """The samples of the batch that is being fetched. Always the same list."""
        self.words = memoryview(array("q", [0] * _NUM_WORDS))
        """The counts. `share` replaces them."""
        self._segment: Segment | None = None
        """This reference keeps the page mapped."""

    def share(self) -> int:
        """Count in a new page from now on. Return its descriptor, which the caller passes on and closes.

        Raises `SharedMemoryFull` if there is not enough memory.
        """
        segment, descriptor = Segment.create(mmap.PAGESIZE)
        self.count_in(segment)
        return descriptor

    def count_in(self, segment: Segment) -> None:
        """Count in this page from now on."""
        self._segment, self.words = segment, segment.memory.cast("q")

    def begin(self, *, in_bulk: bool) -> list[Any]:
        """Clear the list and return it, for the samples of the next batch."""
        self.samples.clear()
        self.words[NUM_LEFT_OUT] = _IN_BULK if in_bulk else 0
        return self.samples

    def fetch_one_by_one(self) -> None:
        """Record that the samples are fetched one by one from now on."""
        self.words[NUM_LEFT_OUT] = 0

    def leave_out(self) -> None:
        """Record that a sample was left out of the batch."""
        self.words[NUM_LEFT_OUT] += 1

    def position_in_batch(self) -> int | None:
        """Return the same as `CounterReader.position_in_batch`. For another thread of the same process."""
        num_left_out = self.words[NUM_LEFT_OUT]
        return None if num_left_out < 0 else len(self.samples) + num_left_out

    def length_address(self) -> int:
        """Return the address of the list's length (64 bits); `UNKNOWN_ADDRESS` if it isn't where it is expected."""
        address = id(self.samples) + object.__basicsize__
        length = ctypes.c_ssize_t.from_address(address)
        for _ in range(2):
            if length.value != len(self.samples):
                return UNKNOWN_ADDRESS
            self.samples.append(None)
        self.samples.clear()
        return address

    def __repr__(self) -> str:
        return f"<CounterWriter {self.words[NUM_BEGUN]} begun, {self.words[NUM_LEFT_OUT]} left out>"


class CounterReader:
    """The trainer's side. Any thread may read."""

    def __init__(self, segment: Segment, read_length: Callable[[], int | None]) -> None:
        """Read a worker's page, `segment`.

        `read_length` returns the length of the worker's list of samples; None if it is unknown. May block shortly.
        """
        self._segment = segment
        """This reference keeps the page mapped."""
        self._words = self._segment.memory.cast("q")
        self._read_length = read_length

    @property
    def num_begun(self) -> int:
        """How many tasks the worker has started."""
        return self._words[NUM_BEGUN]

    def position_in_batch(self) -> int | None:
        """Return the position, in the batch as planned, of the sample that it is fetching; None if unknown.

        After the last sample, it is the number of samples.
        """
        num_left_out = self._words[NUM_LEFT_OUT]
        length = self._read_length() if num_left_out >= 0 else None
        return None if length is None else length + num_left_out

    def __repr__(self) -> str:
        return f"<CounterReader, {self.num_begun} begun>"


def read_word(pid: int, address: int) -> int | None:
    """Return a 64-bit word of another process's memory; None if the address is unknown, or the kernel doesn't allow."""
    if address == UNKNOWN_ADDRESS:
        return None
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return int.from_bytes(os.pread(memory.fileno(), 8, address), sys.byteorder)
    except OSError:
        return None
