"""The messages between the rank that loads and the ranks that share its batches. Pure: no I/O, no clock.

`Push` and `Taken` come with each batch and are packed by hand. The others are rare.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from swift_loader.sampling.plan import PlanSettings
from swift_loader.transport.bodies import PickledBody, malformed
from swift_loader.transport.frames import Frame, Kind, pack_frame

__all__ = ["Awaited", "Dropped", "End", "Ended", "BatchId", "Push", "Taken", "Welcome", "key_of"]

_PUSH = struct.Struct("<QqqIII")
_TAKEN = struct.Struct("<QQqqII")
_LENGTH = struct.Struct("<I")


class BatchId(NamedTuple):
    """Which batch it is."""

    plan: int
    """The key of its plan."""
    epoch: int
    step: int

    @property
    def text(self) -> str:
        """Which one it is, for a message."""
        return f"batch {self.step} of epoch {self.epoch}"


def key_of(plan: PlanSettings) -> int:
    """Return a number that is equal for equal plans, in all processes."""
    return int.from_bytes(blake2b(repr(plan).encode(), digest_size=8).digest(), "little")


@dataclass(slots=True)
class Welcome(PickledBody):
    """The dataset is built."""

    KIND = Kind.WELCOME

    num_samples: int
    definitions: list[str]
    """The names of what travels by value, by number."""


@dataclass(slots=True)
class Push:
    """A batch, or what came in its place."""

    batch_id: BatchId
    generation: int
    """Of the rank that loads."""
    worker_id: int
    """Which of its workers has built it."""
    pid: int
    frames: Sequence[bytes | memoryview]
    """The worker's messages: about samples that failed, then the batch or its failure. A batch's slot is the number of
    the segment, as announced before."""

    def pack(self) -> bytes:
        """Return the frame."""
        parts: list[bytes | memoryview] = [_PUSH.pack(*self.batch_id, self.worker_id, self.pid, len(self.frames))]
        for frame in self.frames:
            parts += (_LENGTH.pack(len(frame)), frame)
        return pack_frame(Kind.PUSH, b"".join(parts), self.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> Push:
        """Return the message in a frame; `frames` are views of it."""
        try:
            plan, epoch, step, worker_id, pid, num_frames = _PUSH.unpack_from(frame.body)
            begin, frames = _PUSH.size, []
            for _ in range(num_frames):
                [length] = _LENGTH.unpack_from(frame.body, begin)
                begin += _LENGTH.size
                frames.append(frame.body[begin : begin + length])
                begin += length
        except struct.error:
            raise malformed(frame) from None
        if begin != len(frame.body) or not frames:
            raise malformed(frame)
        return cls(BatchId(plan, epoch, step), frame.generation, worker_id, pid, frames)


@dataclass(slots=True)
class Dropped(PickledBody):
    """The rank that loads has gone elsewhere. It won't take the batches of earlier generations after this one."""

    KIND = Kind.DROPPED

    generation: int
    """The first one that isn't meant."""
    epoch: int
    step: int


class End(Enum):
    """Why no more batches come."""

    CLOSED = "closed"
    """The loader of the rank that loads was closed."""
    FAILED = "failed"
    """It can't go on."""
    MISMATCH = "mismatch"
    """The ranks take different batches."""
    STALLED = "stalled"
    """It has waited too long for another rank."""


@dataclass(slots=True)
class Ended(PickledBody):
    """No more batches come."""

    KIND = Kind.ENDED

    why: End
    text: str


@dataclass(slots=True)
class Taken:
    """The loop has taken a batch."""

    num_taken: int
    """How many it has taken, with this one."""
    batch_id: BatchId
    released: Sequence[int]
    """Segments that it doesn't use any more."""
    retired: Sequence[int]
    """The same; but a fork of the process may use them still."""

    def pack(self) -> bytes:
        """Return the frame."""
        slots = (*self.released, *self.retired)
        head = _TAKEN.pack(self.num_taken, *self.batch_id, len(self.released), len(self.retired))
        return pack_frame(Kind.TAKEN, head + struct.pack(f"<{len(slots)}I", *slots))

    @classmethod
    def unpack(cls, frame: Frame) -> Taken:
        """Return the message in a frame."""
        try:
            num_taken, plan, epoch, step, num_released, num_retired = _TAKEN.unpack_from(frame.body)
            slots = struct.unpack(f"<{num_released + num_retired}I", frame.body[_TAKEN.size :])
        except struct.error:
            raise malformed(frame) from None
        return cls(num_taken, BatchId(plan, epoch, step), slots[:num_released], slots[num_released:])


@dataclass(slots=True)
class Awaited(PickledBody):
    """The loop has waited for a batch for a while."""

    KIND = Kind.AWAITED

    num_taken: int
    """How many it has taken before."""
    plan: int
    epoch: int
    step: int
