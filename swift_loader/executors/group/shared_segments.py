"""The memory of the workers, as the rank that loads and the ranks that share its batches name it: by numbers.

A worker's slot number says too little: the workers number their slots each for themselves. A number is used once.
"""

from __future__ import annotations

import weakref
from collections import deque

from swift_loader.transport.messages import NO_SLOT
from swift_loader.transport.private_pages import PrivatePages
from swift_loader.transport.segments import Segment

__all__ = ["SharedSegments"]


class SharedSegments:
    """The segments that this rank has mapped. The caller of `new_number` and `attach` holds the leader's lock."""

    def __init__(self) -> None:
        self._num_segments = 0
        self._numbers: dict[int, int] = {}
        """By the id of the object."""
        self._gone: deque[int] = deque()
        """Those that were unmapped. Any thread appends, also in a finaliser."""
        self._pages = PrivatePages()

    def fileno(self) -> int:
        """Return the descriptor that it owns; -1 once closed."""
        return self._pages.fileno()

    def new_number(self) -> int:
        """Return the number of the next segment."""
        self._num_segments += 1
        return self._num_segments

    def attach(self, number: int, descriptor: int, nbytes: int) -> Segment:
        """Map a segment, so that what this process writes stays in it. The descriptor is owned by this call."""
        segment = Segment.attach(descriptor, nbytes, private=True)
        segment.renew = self._pages.restore
        self._numbers[id(segment)] = number
        weakref.finalize(segment, self._note_end, id(segment), number).atexit = False
        return segment

    def _note_end(self, identity: int, number: int) -> None:
        """Note that a segment is unmapped. Any thread, also in a finaliser: so it takes no lock."""
        self._numbers.pop(identity, None)
        self._gone.append(number)

    def number_of(self, segment: Segment | None) -> int:
        """Return the number of a segment; `NO_SLOT` for None. Any thread."""
        return NO_SLOT if segment is None else self._numbers[id(segment)]

    def take_gone(self) -> list[int]:
        """Return those that were unmapped since the last call. One thread at a time."""
        gone: list[int] = []
        while self._gone:
            gone.append(self._gone.popleft())
        return gone

    def close(self) -> None:
        """Close the descriptor. Segments stay mapped. Idempotent."""
        self._pages.close()

    def __repr__(self) -> str:
        return f"<SharedSegments, {len(self._numbers)} of {self._num_segments} mapped>"
