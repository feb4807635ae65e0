"""The last delivered batches, in a ring of fixed size. Pure.

A row is written with one `struct.pack_into`, which takes 0.4 us. Collecting tuples in a list and converting them many
at a time takes as long, and holds Python objects for each batch.

One thread at a time adds rows. Any thread may read: it gets whole rows, because adding one holds the GIL.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import BATCH

__all__ = ["CAPACITY", "Arrival", "Timeline"]

CAPACITY = 4096
"""Rows that are kept."""

Arrival = tuple[int, ...]
"""The fields of `BATCH` up to `decode_ns`, in that order: what is known once a batch has arrived in the trainer."""

_ROW = struct.Struct("<qqiiqqqqqqqqqqqqiiq")
"""The layout of `BATCH`, which has no padding."""

_COPY = struct.Struct("<q")
_COPY_OFFSET: int = BATCH.fields["copy_ns"][1] if BATCH.fields is not None else 0


class Timeline:
    """The last `CAPACITY` batches that the loop got."""

    def __init__(self) -> None:
        self.num_added = 0
        """Rows that were ever added. The next one has this number."""
        self._rows: NDArray[np.void] = np.zeros(CAPACITY, BATCH)
        self._memory = self._rows.view(np.uint8).data

    def add(self, arrival: Arrival, asked_ns: int, delivered_ns: int, num_ready: int, pass_number: int) -> int:
        """Add a row, in place of the oldest one if the ring is full. Return its number. It has no copy yet."""
        number = self.num_added
        offset = number % CAPACITY * _ROW.size
        _ROW.pack_into(self._memory, offset, *arrival, asked_ns, delivered_ns, num_ready, pass_number, 0)
        self.num_added = number + 1
        return number

    def set_copy(self, number: int, copy_ns: int) -> None:
        """Set how long the copy to the device took. Does nothing if the row isn't there any more."""
        if number >= self.num_added - CAPACITY:
            _COPY.pack_into(self._memory, number % CAPACITY * _ROW.size + _COPY_OFFSET, copy_ns)

    def since(self, number: int) -> NDArray[np.void]:
        """Return a copy of the rows from this number on, oldest first; of those that are still there."""
        end = self.num_added
        first = min(max(number, end - CAPACITY, 0), end)
        begin, stop = first % CAPACITY, end % CAPACITY
        rows = self._rows
        parts = [rows[begin:stop]] if begin < stop or first == end else [rows[begin:], rows[:stop]]
        joined: NDArray[np.void] = np.concatenate(parts)
        return joined

    def __repr__(self) -> str:
        return f"<Timeline of {self.num_added} batches>"
