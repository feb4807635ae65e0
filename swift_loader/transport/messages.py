"""The messages, as types. Pure: no I/O, no clock.

`unpack` raises `ProtocolError` for a body that `pack` doesn't write. It checks lengths before it reads anything.

`Task` and `Batch` are on the hot path and packed by hand. The others travel once per worker, segment or failure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from swift_loader.errors import ProtocolError
from swift_loader.transport.bodies import FixedBody, PickledBody, malformed
from swift_loader.transport.frames import Frame, Kind, pack_frame
from swift_loader.transport.reports import BuildReport, Verdict

if TYPE_CHECKING:
    from swift_loader.sampling.plan import PlanSettings

__all__ = [
    "MAX_INDICES_PER_TASK",
    "MAX_INLINE_BYTES",
    "NO_SLOT",
    "Batch",
    "Built",
    "Exited",
    "Failure",
    "Fork",
    "Forked",
    "NewPlan",
    "Ready",
    "Recheck",
    "SampleFailed",
    "SegmentGone",
    "SegmentMade",
    "Stage",
    "Task",
    "Verdicts",
]

NO_SLOT = 0xFFFFFFFF
"""The slot number of a batch without bulk data."""

MAX_INLINE_BYTES = 16 * 1024
"""A batch's structure up to this size travels in the message; a larger one travels in the slot."""

MAX_SLOTS_PER_TASK = 1024
"""Maximum number of released slots that one task names; the others go into the next task."""

MAX_INDICES_PER_TASK = 7 * 1024
"""Maximum number of indices of a task that a sampler chose them for, so that it fits into one message."""

_TASK = struct.Struct("<QqqIIi")
_SLOT_NBYTES = 4
_INDEX_NBYTES = 8
_NOT_CHOSEN = -1
"""The number of indices of a task whose indices the worker computes."""
_BATCH = struct.Struct("<QIIQIIQQQQ")


@lru_cache(64)  # all tasks of a loop have a few layouts; making one anew would take as long as packing
def _layout(num_slots: int, num_indices: int = 0) -> struct.Struct:
    """Return the layout of what comes after a task's head."""
    return struct.Struct(f"<{num_slots}I{num_indices}q")


class Stage(str, Enum):
    """What a worker was doing when an exception was raised."""

    BUILD = "building the dataset"
    FETCH = "fetching a sample"
    COLLATE = "collating a batch"
    ENCODE = "encoding a batch"


@dataclass(slots=True)
class Task:
    """Asks for one batch."""

    generation: int
    """0: the trial batch. It belongs to no run of the loop, so it is never skipped."""
    sequence: int
    """Number of the batch within its generation, in the order of delivery."""
    epoch: int
    step: int
    indices: Sequence[int] | None = None
    """The dataset indices that a sampler chose, at most `MAX_INDICES_PER_TASK`. None: the worker computes them from its
    plan, `epoch` and `step`."""
    released: Sequence[int] = ()
    """Slots whose batches the user has dropped: the worker may write to them again."""
    retired: Sequence[int] = ()
    """Slots that the trainer has unmapped: the worker should unmap them, too."""

    def pack(self) -> bytes:
        """Return the frame."""
        released, retired, indices = self.released, self.retired, self.indices
        num_released, num_retired = len(released), len(retired)
        if indices is None:
            num_indices, rest = _NOT_CHOSEN, _layout(num_released + num_retired).pack(*released, *retired)
        else:
            num_indices = len(indices)
            rest = _layout(num_released + num_retired, num_indices).pack(*released, *retired, *indices)
        head = _TASK.pack(self.sequence, self.epoch, self.step, num_released, num_retired, num_indices)
        return pack_frame(Kind.TASK, head + rest, self.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> Task:
        """Return the task in a frame."""
        generation, body = frame.generation, frame.body
        if len(body) < _TASK.size:
            raise malformed(frame)
        sequence, epoch, step, num_released, num_retired, num_indices = _TASK.unpack_from(body)
        num_slots = num_released + num_retired
        num_chosen = 0 if num_indices == _NOT_CHOSEN else num_indices
        if num_chosen < 0 or len(body) != _TASK.size + num_slots * _SLOT_NBYTES + num_chosen * _INDEX_NBYTES:
            raise malformed(frame)
        rest = _layout(num_slots, num_chosen).unpack_from(body, _TASK.size)
        indices = None if num_indices == _NOT_CHOSEN else rest[num_slots:]
        return cls(generation, sequence, epoch, step, indices, rest[:num_released], rest[num_released:num_slots])


@dataclass(slots=True)
class NewPlan(PickledBody):
    """Sets the plan for the tasks of this generation and later ones."""

    KIND = Kind.PLAN

    generation: int
    settings: PlanSettings


@dataclass(slots=True)
class Batch:
    """Announces a batch. `meta` is what the codec needs besides the bulk data in the slot."""

    generation: int
    sequence: int
    slot: int
    num_blocks: int
    meta: memoryview | bytes
    """Empty if it is in the slot, at `meta_offset`."""
    meta_offset: int
    meta_nbytes: int
    num_samples: int
    fetch_ns: int
    collate_ns: int
    encode_ns: int
    used_nbytes: int = 0
    """The batch is in the slot's first `used_nbytes` bytes; 0: it may use all of them."""

    def pack(self) -> bytes:
        """Return the frame."""
        head = _BATCH.pack(
            self.sequence,
            self.slot,
            self.num_blocks,
            self.meta_offset,
            self.meta_nbytes,
            self.num_samples,
            self.fetch_ns,
            self.collate_ns,
            self.encode_ns,
            self.used_nbytes,
        )
        return pack_frame(Kind.BATCH, head + self.meta, self.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> Batch:
        """Return the batch in a frame; `meta` is a view of the frame."""
        if len(frame.body) < _BATCH.size:
            raise malformed(frame)
        sequence, slot, num_blocks, offset, nbytes, num_samples, *rest = _BATCH.unpack_from(frame.body)
        meta = frame.body[_BATCH.size :]
        if len(meta) not in (0, nbytes):
            raise ProtocolError(
                f"a batch of {num_blocks} buffers comes with {len(meta)} of {nbytes} bytes of structure"
            )
        return cls(frame.generation, sequence, slot, num_blocks, meta, offset, nbytes, num_samples, *rest)


@dataclass(slots=True)
class Ready(PickledBody):
    """The worker accepts tasks; the descriptor of its counters is attached."""

    KIND = Kind.READY

    length_address: int
    """Address in the worker's memory of a 64-bit word: the number of samples fetched for the current batch."""
    report: BuildReport
    """Describes the worker's dataset."""


@dataclass(slots=True)
class Recheck(FixedBody):
    """Asks why the reported samples may differ from those of another build."""

    KIND = Kind.RECHECK
    LAYOUT = struct.Struct("")


@dataclass(slots=True)
class Verdicts(PickledBody):
    """The answer to RECHECK."""

    KIND = Kind.RECHECKED

    by_index: dict[int, Verdict]


@dataclass(slots=True)
class SegmentMade(FixedBody):
    """The worker made a slot; the descriptor of its memory is attached."""

    KIND = Kind.SEGMENT
    LAYOUT = struct.Struct("<IQ")

    slot: int
    nbytes: int


@dataclass(slots=True)
class SegmentGone(FixedBody):
    """The worker has unmapped a free slot and won't use it again: the trainer should unmap it, too."""

    KIND = Kind.SEGMENT_GONE
    LAYOUT = struct.Struct("<I")

    slot: int


@dataclass(slots=True)
class Failure(PickledBody):
    """The user's code raised."""

    KIND = Kind.FAILURE

    generation: int
    sequence: int
    stage: Stage
    index: int | None
    """The dataset index of the sample that was being fetched."""
    pickled: bytes | None
    """The exception, encoded by the codec; None if it can't be encoded and decoded."""
    num_blocks: int
    type_name: str
    message: str
    traceback: str


@dataclass(slots=True)
class SampleFailed(PickledBody):
    """A sample of the next announced batch failed, and isn't in the batch."""

    KIND = Kind.SAMPLE_FAILED

    position: int
    """The sample's planned position in the batch."""
    replaced_by: int | None
    """The dataset index of the sample that replaces it; None if it was left out."""
    failure: Failure


@dataclass(slots=True)
class Built(PickledBody):
    """The template has built the dataset. Says whether workers share it or each builds its own."""

    KIND = Kind.BUILT

    report: BuildReport
    forkable: bool
    """False: each worker needs its own interpreter."""
    reason: str
    """Why the dataset isn't shared, or why the template can't be forked; for the log. Empty if it is shared."""


@dataclass(slots=True)
class Fork(FixedBody):
    """Asks for a worker; its channel is attached."""

    KIND = Kind.FORK
    LAYOUT = struct.Struct("<I?")

    worker: int
    in_place: bool
    """True: the receiver becomes the worker instead of forking one."""


@dataclass(slots=True)
class Forked(FixedBody):
    """A worker was forked; its pidfd is attached."""

    KIND = Kind.FORKED
    LAYOUT = struct.Struct("<II")

    worker: int
    pid: int


@dataclass(slots=True)
class Exited(FixedBody):
    """A forked worker is gone and reaped."""

    KIND = Kind.EXITED
    LAYOUT = struct.Struct("<Ii")

    worker: int
    exit_code: int
    """As `os.waitstatus_to_exitcode` returns it: negative for a signal."""
