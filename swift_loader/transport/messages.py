"""The messages between the trainer and a worker, as types, apart from tasks. Pure: no I/O, no clock.

`unpack` raises `ProtocolError` for a body that `pack` doesn't write. It checks lengths before it reads anything.

`Batch` is on the hot path and packed by hand, as `task.Task` is. The others travel once per worker, segment or failure.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from swift_loader.errors import ProtocolError
from swift_loader.transport.frames import Frame, Kind, pack_frame

if TYPE_CHECKING:
    from swift_loader.sampling.plan import PlanSettings


# The two ways to write a message's body: fields of fixed sizes, or a pickle. Pure.
#
# Unpickling is safe, because the sender is a process of ours on a private pipe.

_Fixed = TypeVar("_Fixed", bound="FixedBody")
_Pickled = TypeVar("_Pickled", bound="PickledBody")


def malformed(frame: Frame) -> ProtocolError:
    """Return the error for a body that its sender can't have written."""
    return ProtocolError(f"a message of kind {frame.kind.name} has a malformed body of {len(frame.body)} bytes")


class FixedBody:
    """Base of a dataclass whose fields are packed by `LAYOUT`, in their order."""

    __slots__ = ()

    KIND: ClassVar[Kind]
    LAYOUT: ClassVar[struct.Struct]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(self.KIND, self.LAYOUT.pack(*_values(self)))

    @classmethod
    def unpack(cls: type[_Fixed], frame: Frame) -> _Fixed:
        """Return the message in a frame.

        Raises `ProtocolError` if the body has another length, or the class refuses the values.
        """
        try:
            return cls(*cls.LAYOUT.unpack(frame.body))
        except (struct.error, ValueError) as error:
            raise malformed(frame) from error


class PickledBody:
    """Base of a dataclass whose fields are pickled together."""

    __slots__ = ()

    KIND: ClassVar[Kind]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(self.KIND, pickle.dumps(tuple(_values(self))))

    @classmethod
    def unpack(cls: type[_Pickled], frame: Frame) -> _Pickled:
        """Return the message in a frame. Raises `ProtocolError` if the body isn't a pickle of as many fields."""
        try:
            return cls(*pickle.loads(frame.body))
        except Exception as error:  # pickle raises all sorts
            raise malformed(frame) from error


def _values(message: FixedBody | PickledBody) -> Iterable[Any]:
    return (getattr(message, field.name) for field in fields(message))


# What a process reports about the dataset that it has built. Pure.

Checksums = tuple[tuple[int, int], ...]
"""(dataset index, checksum) of some samples."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Describes the dataset that a process has built. The trainer compares the reports of all builds."""

    num_samples: int
    hash_of_text: int
    """Hash of a fixed string: two processes get the same value only if they have the same hash seed."""
    checksums: Checksums = ()
    """Empty if this process didn't build the dataset itself, or if no checksum could be taken."""


NO_SLOT = 0xFFFFFFFF
"""The slot number of a batch without bulk data."""

MAX_INLINE_BYTES = 16 * 1024
"""A batch's structure up to this size travels in the message; a larger one travels in the slot."""

_BATCH = struct.Struct("<QIIQIIQQQQQqqqQ")


class FailureStage(str, Enum):
    """What a worker was doing when an exception was raised."""

    BUILD = "building the dataset"
    SET_UP = "setting up the worker"
    FETCH = "fetching a sample"
    COLLATE = "collating a batch"
    ENCODE = "encoding a batch"
    SAVE = "saving the dataset's state"
    LOAD = "restoring the dataset's state"


@dataclass(slots=True)
class NewPlan(PickledBody):
    """Sets the plan for the tasks of this generation and later ones."""

    KIND = Kind.PLAN

    generation: int
    settings: PlanSettings
    resume: bytes | None = None
    """Where the worker's dataset continues: a `worker.torch_worker.Resume`, packed. None: at its beginning."""
    turn: int = 0
    """Which batch of the worker's shard of a stream is the first one after that."""


@dataclass(slots=True)
class Hung(PickledBody):
    """Names a sample at which a worker was killed. It fails in this epoch, so that it is left out or replaced."""

    KIND = Kind.HUNG

    epoch: int
    index: Any
    """Its dataset index."""
    why: str
    """The text of its `TimeoutError`."""
    num_replacements: int = 0
    """How many samples in its place hung, too."""


@dataclass(slots=True)
class Identity(FixedBody):
    """The first message to a worker that has to tell the dataset which one it is."""

    KIND = Kind.IDENTITY
    LAYOUT = struct.Struct("<III")

    worker_id: int
    num_workers: int
    """How many there are when it starts."""
    num_kept: int = 0
    """How many segments it gets of an earlier worker's."""


@dataclass(slots=True)
class StreamEnded(FixedBody):
    """The worker's shard of the stream had no batch left for its oldest task."""

    KIND = Kind.STREAM_ENDED
    LAYOUT = struct.Struct("<IQ")

    generation: int
    sequence: int


@dataclass(slots=True)
class State(PickledBody):
    """The state of the worker's dataset after the batch that is announced next."""

    KIND = Kind.STATE

    snapshot: bytes
    """A `worker.torch_worker.Snapshot`, packed."""


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
    began_ns: int = 0
    """When the worker began it, by `time.perf_counter_ns`."""
    cpu_ns: int = 0
    """CPU time of the worker since its batch before."""
    run_delay_ns: int = -1
    """How long it was ready to run in that time, but had no core; -1: not measured."""
    slow_index: int = 0
    """Dataset index of the sample that took longest to fetch."""
    slow_ns: int = 0
    """How long that took; 0: not measured."""

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
            self.began_ns,
            self.cpu_ns,
            self.run_delay_ns,
            self.slow_index,
            self.slow_ns,
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
    stage: FailureStage
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
