"""What a worker shows to the trainer at any time, also after its death: a page of shared memory with a few counts.

The worker makes it and alone writes to it, with plain stores of aligned words; the trainer reads.
"""

from __future__ import annotations

import mmap
from array import array

from swift_loader.transport.segments import Segment

__all__ = ["NUM_BEGUN", "NUM_LEFT_OUT", "Board"]


NUM_BEGUN = 0
"""The word that counts the tasks that the worker has begun."""

NUM_LEFT_OUT = 1
"""The word that counts samples that the batch it is at goes on without; negative while all are asked for at once."""

_NUM_WORDS = 2
"""Of 64 bits."""


class Board:
    """The page. `words` is all that the hot path touches."""

    def __init__(self, segment: Segment | None = None) -> None:
        """Make one on the heap, for a process that nobody looks into; or use a mapping."""
        self._segment = segment
        """Kept mapped."""
        self.words = memoryview(array("q", [0] * _NUM_WORDS)) if segment is None else segment.memory.cast("q")

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """Return a new one and its descriptor, which the caller passes on and closes.

        Raises:
            SharedMemoryFull: The memory can't be had.
        """
        segment, descriptor = Segment.create(mmap.PAGESIZE)
        return cls(segment), descriptor

    @classmethod
    def attach(cls, descriptor: int) -> Board:
        """Return the one of another process, and close the descriptor."""
        return cls(Segment.attach(descriptor, mmap.PAGESIZE))

    def __repr__(self) -> str:
        return f"<Board {self.words[NUM_BEGUN]} begun, {self.words[NUM_LEFT_OUT]} left out>"
