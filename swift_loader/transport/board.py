"""A page of shared memory with a few counts. The trainer can read it at any time, also after the worker's death.

The worker creates the page. Only the worker writes to it, with plain stores of aligned words; the trainer reads.
"""

from __future__ import annotations

import mmap
from array import array

from swift_loader.transport.segments import Segment

__all__ = ["NUM_BEGUN", "NUM_LEFT_OUT", "Board"]


NUM_BEGUN = 0
"""Index of the word that counts the tasks that the worker has started."""

NUM_LEFT_OUT = 1
"""Index of the word that counts the samples left out of the current batch; negative while `__getitems__` fetches the
batch at once."""

_NUM_WORDS = 2
"""64 bits each."""


class Board:
    """The page. `words` is all that the hot path touches."""

    def __init__(self, segment: Segment | None = None) -> None:
        """Use a mapping; without one use the heap, for a process whose board nobody reads."""
        self._segment = segment
        """This reference keeps the memory mapped."""
        self.words = memoryview(array("q", [0] * _NUM_WORDS)) if segment is None else segment.memory.cast("q")

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """Return a new board and its descriptor, which the caller passes on and closes.

        Raises:
            SharedMemoryFull: There is not enough memory.
        """
        segment, descriptor = Segment.create(mmap.PAGESIZE)
        return cls(segment), descriptor

    @classmethod
    def attach(cls, descriptor: int) -> Board:
        """Return another process's board, and close the descriptor."""
        return cls(Segment.attach(descriptor, mmap.PAGESIZE))

    def __repr__(self) -> str:
        return f"<Board {self.words[NUM_BEGUN]} begun, {self.words[NUM_LEFT_OUT]} left out>"
