"""The bodies of the messages, as types. Pure: no I/O, no clock.

`unpack` raises `ProtocolError` for a body that `pack` doesn't write. It checks lengths before it reads anything. Some
bodies are pickled; unpickling them is safe, because their sender is a process of ours on a private pipe.

`Task` and `Batch` are on the hot path and packed by hand. The others travel once per worker, segment or failure.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from swift_loader.errors import ProtocolError
from swift_loader.transport.frames import Frame, Kind, pack_frame
from swift_loader.transport.reports import BuildReport, Verdict

if TYPE_CHECKING:
    from swift_loader.plan import PlanSettings

__all__ = [
    "MAX_INDICES_PER_TASK",
    "MAX_INLINE_BYTES",
    "NO_SLOT",
    "UNKNOWN_ADDRESS",
    "Batch",
    "Built",
    "Exited",
    "Failure",
    "Fork",
    "Forked",
    "NewPlan",
    "Ready",
    "SampleFailed",
    "SegmentGone",
    "SegmentMade",
    "Stage",
    "Task",
    "Verdicts",
    "Verify",
]

NO_SLOT = 0xFFFFFFFF
"""The slot number of a batch without bulk data."""

UNKNOWN_ADDRESS = 0
"""The address of a word in a worker's memory that the trainer can't read."""

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
_SEGMENT = struct.Struct("<IQ")
_SEGMENT_GONE = struct.Struct("<I")
_SAMPLE = struct.Struct("<I?q")
_FORK = struct.Struct("<I?")
_FORKED = struct.Struct("<II")
_EXITED = struct.Struct("<Ii")


def _malformed(frame: Frame) -> ProtocolError:
    return ProtocolError(f"a message of kind {frame.kind.name} has a malformed body of {len(frame.body)} bytes")


def _fields(layout: struct.Struct, frame: Frame) -> tuple[Any, ...]:
    """Return the fields of a body that has exactly this layout."""
    if len(frame.body) != layout.size:
        raise _malformed(frame)
    return layout.unpack(frame.body)


class Stage(str, Enum):
    """What a worker was doing when an exception was raised."""

    BUILD = "building the dataset"
    FETCH = "fetching a sample"
    COLLATE = "collating a batch"
    ENCODE = "encoding a batch"


@dataclass(slots=True)
class Verdicts:
    """The answer to VERIFY."""

    by_index: dict[int, Verdict]

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.VERIFIED, pickle.dumps([(index, one.name) for index, one in self.by_index.items()]))

    @classmethod
    def unpack(cls, frame: Frame) -> Verdicts:
        """Return the verdicts in a frame."""
        try:
            return cls({int(index): Verdict[name] for index, name in pickle.loads(frame.body)})
        except Exception as error:  # pickle raises all sorts
            raise _malformed(frame) from error


@dataclass(slots=True)
class Verify:
    """Asks why the reported samples may differ from those of another build."""

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.VERIFY)

    @classmethod
    def unpack(cls, frame: Frame) -> Verify:
        """Return the request in a frame."""
        if frame.body:
            raise _malformed(frame)
        return cls()


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
        indices, slots = self.indices, (*self.released, *self.retired)
        num_indices = _NOT_CHOSEN if indices is None else len(indices)
        body = _TASK.pack(self.sequence, self.epoch, self.step, len(self.released), len(self.retired), num_indices)
        body += struct.pack(f"<{len(slots)}I", *slots)
        if indices is not None:
            body += struct.pack(f"<{num_indices}q", *indices)
        return pack_frame(Kind.TASK, body, self.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> Task:
        """Return the task in a frame."""
        if len(frame.body) < _TASK.size:
            raise _malformed(frame)
        sequence, epoch, step, num_released, num_retired, num_indices = _TASK.unpack_from(frame.body)
        end_of_slots = _TASK.size + (num_released + num_retired) * _SLOT_NBYTES
        if num_indices < _NOT_CHOSEN or len(frame.body) != end_of_slots + max(0, num_indices) * _INDEX_NBYTES:
            raise _malformed(frame)
        slots = struct.unpack_from(f"<{num_released + num_retired}I", frame.body, _TASK.size)
        indices = None
        if num_indices != _NOT_CHOSEN:
            indices = struct.unpack_from(f"<{num_indices}q", frame.body, end_of_slots)
        return cls(frame.generation, sequence, epoch, step, indices, slots[:num_released], slots[num_released:])


@dataclass(slots=True)
class NewPlan:
    """Sets the plan for the tasks of this generation and later ones."""

    generation: int
    settings: PlanSettings

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.PLAN, pickle.dumps(self.settings), self.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> NewPlan:
        """Return the plan in a frame."""
        try:
            return cls(frame.generation, pickle.loads(frame.body))
        except Exception as error:  # pickle raises all sorts
            raise _malformed(frame) from error


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
            raise _malformed(frame)
        sequence, slot, num_blocks, offset, nbytes, num_samples, *rest = _BATCH.unpack_from(frame.body)
        meta = frame.body[_BATCH.size :]
        if len(meta) not in (0, nbytes):
            raise ProtocolError(
                f"a batch of {num_blocks} buffers comes with {len(meta)} of {nbytes} bytes of structure"
            )
        return cls(frame.generation, sequence, slot, num_blocks, meta, offset, nbytes, num_samples, *rest)


@dataclass(slots=True)
class Ready:
    """The worker accepts tasks; the descriptor of its board is attached."""

    length_address: int
    """Address in the worker's memory of a 64-bit word: the number of samples fetched for the current batch."""
    report: BuildReport
    """Describes the worker's dataset."""

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.READY, pickle.dumps((self.length_address, self.report)))

    @classmethod
    def unpack(cls, frame: Frame) -> Ready:
        """Return what a frame says."""
        try:
            return cls(*pickle.loads(frame.body))
        except Exception as error:  # pickle raises all sorts
            raise _malformed(frame) from error


@dataclass(slots=True)
class SegmentMade:
    """The worker made a slot; the descriptor of its memory is attached."""

    slot: int
    nbytes: int

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.SEGMENT, _SEGMENT.pack(self.slot, self.nbytes))

    @classmethod
    def unpack(cls, frame: Frame) -> SegmentMade:
        """Return the segment in a frame."""
        return cls(*_fields(_SEGMENT, frame))


@dataclass(slots=True)
class SegmentGone:
    """The worker has unmapped a free slot and won't use it again: the trainer should unmap it, too."""

    slot: int

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.SEGMENT_GONE, _SEGMENT_GONE.pack(self.slot))

    @classmethod
    def unpack(cls, frame: Frame) -> SegmentGone:
        """Return what a frame says."""
        return cls(*_fields(_SEGMENT_GONE, frame))


@dataclass(slots=True)
class Failure:
    """The user's code raised."""

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

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.FAILURE, self.body(), self.generation)

    def body(self) -> bytes:
        """Return the frame's body."""
        error = (self.pickled, self.num_blocks, self.type_name, self.message, self.traceback)
        return pickle.dumps((self.sequence, self.stage.name, self.index, *error))

    @classmethod
    def unpack(cls, frame: Frame) -> Failure:
        """Return the failure in a frame."""
        try:
            sequence, stage, *rest = pickle.loads(frame.body)
            return cls(frame.generation, sequence, Stage[stage], *rest)
        except Exception as error:  # pickle raises all sorts
            raise _malformed(frame) from error


@dataclass(slots=True)
class SampleFailed:
    """A sample of the next announced batch failed, and isn't in the batch."""

    position: int
    """The sample's planned position in the batch."""
    replaced_by: int | None
    """The dataset index of the sample that replaces it; None if it was left out."""
    failure: Failure

    def pack(self) -> bytes:
        """Return the frame."""
        head = _SAMPLE.pack(self.position, self.replaced_by is not None, self.replaced_by or 0)
        return pack_frame(Kind.SAMPLE_FAILED, head + self.failure.body(), self.failure.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> SampleFailed:
        """Return what a frame says."""
        if len(frame.body) < _SAMPLE.size:
            raise _malformed(frame)
        position, is_replaced, replaced_by = _SAMPLE.unpack_from(frame.body)
        failure = Failure.unpack(frame._replace(body=frame.body[_SAMPLE.size :]))
        return cls(position, replaced_by if is_replaced else None, failure)


@dataclass(slots=True)
class Built:
    """The template has built the dataset. Says whether workers share it or each builds its own."""

    report: BuildReport
    forkable: bool
    """False: each worker needs its own interpreter."""
    reason: str
    """Why the dataset isn't shared, or why the template can't be forked; for the log. Empty if it is shared."""

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.BUILT, pickle.dumps((self.report, self.forkable, self.reason)))

    @classmethod
    def unpack(cls, frame: Frame) -> Built:
        """Return what a frame says."""
        try:
            return cls(*pickle.loads(frame.body))
        except Exception as error:  # pickle raises all sorts
            raise _malformed(frame) from error


@dataclass(slots=True)
class Fork:
    """Asks for a worker; its channel is attached."""

    worker: int
    in_place: bool
    """True: the receiver becomes the worker instead of forking one."""

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.FORK, _FORK.pack(self.worker, self.in_place))

    @classmethod
    def unpack(cls, frame: Frame) -> Fork:
        """Return the request in a frame."""
        return cls(*_fields(_FORK, frame))


@dataclass(slots=True)
class Forked:
    """A worker was forked; its pidfd is attached."""

    worker: int
    pid: int

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.FORKED, _FORKED.pack(self.worker, self.pid))

    @classmethod
    def unpack(cls, frame: Frame) -> Forked:
        """Return what a frame says."""
        return cls(*_fields(_FORKED, frame))


@dataclass(slots=True)
class Exited:
    """A forked worker is gone and reaped."""

    worker: int
    exit_code: int
    """As `os.waitstatus_to_exitcode` returns it: negative for a signal."""

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(Kind.EXITED, _EXITED.pack(self.worker, self.exit_code))

    @classmethod
    def unpack(cls, frame: Frame) -> Exited:
        """Return what a frame says."""
        return cls(*_fields(_EXITED, frame))
