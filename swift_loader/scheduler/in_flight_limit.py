"""Chooses how many batches may be in flight: as many as keep all workers busy, or as many as the user says. Pure.

A batch is in flight from when a worker is to build it until the loop takes it. In completion order, two per worker keep
all of them busy: one to build, and one that waits for the worker or for the loop.

In order, the loop can't take the batches after a slow one, and the other workers continue only up to the limit. With
three per worker, they hardly ever reach it. The table gives the share of the rate in completion order. Batches have 32
samples, and one sample in twenty takes 50 times as long as the rest (in virtual time):

    per worker       2      3      4      6
    8 workers     0.97   1.00   1.00   1.00
    16 workers    0.94   1.00   1.00   1.00
    64 workers    0.87   0.98   0.99   0.99

Each batch more per worker costs the memory of one batch per worker, also where nothing varies.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_IN_FLIGHT = 10
"""For few workers, so that a loop that pauses now and then finds batches ready."""

PER_WORKER = 2
PER_WORKER_IN_ORDER = 3

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_MAX_SHOWN = 999.5
"""With three digits; more is shown in the next unit."""


@dataclass(frozen=True, slots=True)
class InFlightLimit:
    """The limit of one loader."""

    num_batches: int
    num_workers: int
    in_order: bool
    is_chosen: bool
    """True: chosen by the number of workers. False: given by the user."""

    @classmethod
    def of(cls, data_queue_size: int | None, num_workers: int, *, in_order: bool) -> InFlightLimit:
        """Return the limit that was given, or choose one."""
        chosen = data_queue_size is None
        number = _chosen(num_workers, in_order=in_order) if data_queue_size is None else data_queue_size
        return cls(number, num_workers, in_order, chosen)

    @property
    def per_worker(self) -> int:
        """How many batches of one worker may be ready: its share and one more, because some are slower than others."""
        return max(2, self.num_batches // max(1, self.num_workers) + 1)

    @property
    def warning(self) -> str:
        """What the user is told when workers start; empty if all of them can be busy."""
        if self.num_batches >= self.num_workers:
            return ""
        return (
            f"data_queue_size={self.num_batches} keeps at most {self.num_batches} of worker_per_consumer="
            f"{self.num_workers} workers busy. Leave data_queue_size out to get "
            f"{_chosen(self.num_workers, in_order=self.in_order)}, give at least {self.num_workers}, or start fewer "
            f"workers"
        )

    def describe(self, batch_nbytes: int) -> str:
        """Return the number, and the memory that it means if the size of a batch is known; 0 is unknown."""
        remarks = ["chosen"] if self.is_chosen else []
        if batch_nbytes:
            total = self.num_batches * batch_nbytes
            remarks.append(f"{self.num_batches} batches of {_shown_bytes(batch_nbytes)} are {_shown_bytes(total)}")
        return f"{self.num_batches} ({'; '.join(remarks)})" if remarks else str(self.num_batches)


def _chosen(num_workers: int, *, in_order: bool) -> int:
    return max(MIN_IN_FLIGHT, (PER_WORKER_IN_ORDER if in_order else PER_WORKER) * num_workers)


def _shown_bytes(nbytes: int) -> str:
    """Return three digits and a unit."""
    number, unit = float(nbytes), 0
    while number >= _MAX_SHOWN and unit + 1 < len(_UNITS):
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"
