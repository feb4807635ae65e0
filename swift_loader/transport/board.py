"""What a worker shows to the trainer at any time, also after its death: a page of shared memory with a few counts.

The worker makes it and alone writes to it, with plain stores of aligned words; the trainer reads.
"""

from __future__ import annotations

import mmap
from array import array
from enum import IntEnum

from swift_loader.transport.segments import Segment

__all__ = ["Board", "Word"]


class Word(IntEnum):
    """Which of the page's 64-bit words is what."""

    NUM_BEGUN = 0
    """Tasks that the worker has begun, since it started."""
    NUM_LEFT_OUT = 1
    """Samples that the batch it is at goes on without; negative while all samples are asked for at once."""


class Board:
    """The page. `words` is all that the hot path touches."""

    def __init__(self, segment: Segment | None = None) -> None:
        """Make one on the heap, for a process that nobody looks into; or use a mapping."""
        self._segment = segment
        """Kept mapped."""
        self.words = memoryview(array("q", [0] * len(Word))) if segment is None else segment.memory.cast("q")

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
        return f"<Board {', '.join(f'{word.name} {self.words[word]}' for word in Word)}>"
