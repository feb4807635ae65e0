"""Which batches several workers build together, and in how many parts.

A part is some rows of a batch. All parts of a batch are written to one memory. A large batch is split if it would
otherwise be late. Parts are handed out one after another, each to a worker that has nothing else to do: so one worker
builds all of them if no other one is there.

If the parts don't fit together, or one of them fails, the batch is built again as a whole, and what comes of that
counts. The loader splits no batch from then on: text, for example, never fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from swift_loader.scheduler.delivery import Delivery
    from swift_loader.scheduler.work import Work

MIN_ROWS = 8
"""A part has at least so many samples."""

MIN_BATCH_S = 0.02
"""A batch that takes less is never split: parts cost about 1 ms."""

MIN_PART_S = 0.005

NUM_PARTS = 2
"""Of each batch, if the times to build batches vary."""


class Part(NamedTuple):
    """Rows of a batch that a worker builds as one task."""

    begin: int
    end: int
    num_rows: int
    """Of the whole batch."""
    split: Split
    """All parts of the batch."""


@dataclass(slots=True, eq=False)
class Split:
    """A batch that is built in parts."""

    work: Work
    """The whole batch."""
    bounds: list[int]
    """Part i has the rows from `bounds[i]` to `bounds[i + 1]`."""
    parts: list[Delivery] = field(default_factory=list)
    """Those that were assigned."""
    num_ready: int = 0
    memory: Any = None
    """Where the parts are written. It is the executor's, and is freed with this object."""

    @property
    def is_assigned(self) -> bool:
        """Whether workers have got all parts."""
        return len(self.parts) == len(self.bounds) - 1

    @property
    def is_ready(self) -> bool:
        """Whether all parts are built."""
        return self.num_ready == len(self.bounds) - 1

    def next_part(self) -> Part:
        """Return the part that is assigned next."""
        number, bounds = len(self.parts), self.bounds
        return Part(bounds[number], bounds[number + 1], bounds[-1], self)

    def fits(self, header: Any) -> bool:
        """Return whether a part has the header of the whole batch that the other parts have."""
        return all(part.batch == header for part in self.parts if part.batch is not None)


@dataclass(slots=True)
class Splits:
    """Whether the batches of a loader may be split. One for all its workers, so it is known once for all."""

    is_on: bool = True
    """False: parts didn't fit together."""

    def num_parts(
        self, num_rows: int, num_workers: int, build_s: float, num_batches: int, *, is_first: bool, varies: bool
    ) -> int:
        """Return in how many parts a batch is built; 1: as a whole.

        `build_s`: how long a worker takes for a batch; infinite if it isn't known. `num_batches`: how many may be built
        at a time. `is_first`: the loop waits for this batch, and the workers have nothing else to do. `varies`: the
        times to build batches vary, so in order, a slow batch holds up others.
        """
        if not self.is_on or build_s < MIN_BATCH_S:
            return 1
        wanted = NUM_PARTS if varies else 1
        if num_batches < num_workers:
            wanted = max(wanted, -(-num_workers // max(1, num_batches)))
        elif is_first:
            wanted = num_workers
        longest = num_workers if math.isinf(build_s) else int(build_s / MIN_PART_S)
        return max(1, min(wanted, num_workers, longest, num_rows // MIN_ROWS))
