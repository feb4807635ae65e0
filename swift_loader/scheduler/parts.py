"""Which batches several workers build together, and in how many parts.

A part is some rows of a batch. All parts of a batch are written to one memory. A large batch is split if it would
otherwise be late. Parts are handed out one after another, each to a worker that has nothing else to do: so one worker
builds all of them if no other one is there.

If the parts don't fit together, or one of them fails, the batch is built again as a whole, and what comes of that
counts. The loader splits no batch from then on: text, for example, never fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from swift_loader.scheduler.work import Work

MIN_ROWS = 8
"""A part has at least so many samples."""

MIN_BATCH_S = 0.02
"""A batch that takes less is never split: parts cost about 1 ms."""

NUM_PARTS = 2
"""Of each batch, if the times to build batches vary."""


class Part(NamedTuple):
    """Rows of a batch that a worker builds as one task."""

    begin: int
    end: int
    split: Split
    """All parts of the batch."""


@dataclass(slots=True, eq=False)
class Split:
    """A batch that is built in parts."""

    work: Work
    """The whole batch."""
    bounds: list[int]
    """Part i has the rows from `bounds[i]` to `bounds[i + 1]`."""
    sequences: list[int] = field(default_factory=list)
    """Those of the parts that were assigned."""
    arrivals: list[Any] = field(default_factory=list)
    """What was measured of each part that is built."""
    header: Any = None
    """What describes the whole batch, according to the part that was built first."""
    memory: Any = None
    """Where the parts are written. It is the executor's, and is freed with this object."""

    @property
    def is_ready(self) -> bool:
        """Whether all parts are built."""
        return len(self.arrivals) == len(self.bounds) - 1

    def next_part(self) -> Part | None:
        """Return the part that is assigned next; None: workers have got all of them."""
        number, bounds = len(self.sequences), self.bounds
        return Part(bounds[number], bounds[number + 1], self) if number < len(bounds) - 1 else None

    def fits(self, header: Any) -> bool:
        """Return whether a part describes the whole batch as the others do."""
        self.header = self.header or header
        return bool(self.header == header)


@dataclass(slots=True)
class Splits:
    """Whether the batches of a loader may be split. One for all its workers, so it is known once for all."""

    is_on: bool = True
    """False: parts didn't fit together."""
