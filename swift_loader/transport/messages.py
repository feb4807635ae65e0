"""The messages of trainer, workers, templates and roots, as types, apart from tasks. Pure: no I/O, no clock.

`unpack` raises `ProtocolError` for a body that `pack` doesn't write.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from swift_loader.errors import ProtocolError

if TYPE_CHECKING:
    from swift_loader.sampling.plan import PlanSettings


_HEAD = struct.Struct("<BI")
"""Kind and generation. The body follows."""


class Kind(IntEnum):
    """The kind of a message. The comments name sender, receiver and meaning."""

    PAYLOAD = 1  # trainer -> template or portable worker: build the dataset described by the attached file
    BUILT = 2  # template -> trainer: the dataset is built
    FORK = 3  # trainer -> template: start a worker on the attached channel; or to a fork of the root: be a template
    FORKED = 4  # template or root -> trainer: the worker, or the template, has this pid; its pidfd is attached
    EXITED = 5  # template or root -> trainer: that process has exited, with this code
    BLANK = 6  # trainer -> root: import these modules, and fork a template on the attached channel
    REFUSED = 7  # root -> trainer: no template can be forked, for this reason
    WARMED = 8  # root -> trainer: the modules are imported
    READY = 10  # worker -> trainer: it accepts tasks; its counters are attached
    TASK = 12  # trainer -> worker: build this batch
    SEGMENT = 13  # worker -> trainer: batches may be in the attached memory
    BATCH = 14  # worker -> trainer: the batch is in that slot
    FAILURE = 15  # worker or template -> trainer: the user's code raised
    SKIPPED = 16  # worker -> trainer: the task belonged to an abandoned epoch
    PLAN = 17  # trainer -> worker: the tasks that follow belong to another plan
    SAMPLE_FAILED = 18  # worker -> trainer: this sample failed; the next batch is without it, or has another one
    SEGMENT_GONE = 21  # worker -> trainer: no more batches will be in that memory
    STREAM_ENDED = 22  # worker -> trainer: its shard of the stream had no batch left for the task
    STATE = 23  # worker -> trainer: the state of its dataset after the next batch
    IDENTITY = 24  # trainer -> worker: which of the n workers it is
    HUNG = 25  # trainer -> worker: a worker hung at this sample; it fails in this epoch


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """A message whose body isn't unpacked yet."""

    kind: Kind
    generation: int
    """Increases each time the loop jumps to another place; tells leftovers of an abandoned epoch from expected data."""
    body: memoryview


class Received(NamedTuple):
    """A message as it came. `data` is valid until the next `receive` on the same channel."""

    data: memoryview
    descriptors: list[int]
    """Owned by the caller of `receive`. Empty where the system can't send descriptors."""


def pack_frame(kind: Kind, body: bytes = b"", generation: int = 0) -> bytes:
    """Return the bytes of a message."""
    return _HEAD.pack(kind, generation) + body


def unpack_frame(data: memoryview) -> Frame:
    """Return the message in `data`. Its body is a view of `data`. Raises `ProtocolError` if it is of no known kind."""
    if len(data) < _HEAD.size or data[0] not in _KINDS:
        raise ProtocolError(f"a message of {len(data)} bytes that begins with {bytes(data[:8])!r} is of no known kind")
    kind, generation = _HEAD.unpack_from(data)
    return Frame(_KINDS[kind], generation, data[_HEAD.size :])


# How a message's body is written: its fields, pickled together. Pure.
#
# Unpickling is safe, because the sender is a process of ours on a private pipe.

_Body = TypeVar("_Body")
_Message = TypeVar("_Message", bound="PickledBody")


def unpacked(kind: Callable[..., _Body], frame: Frame) -> _Body:
    """Return the message of this kind in a frame.

    Raises `ProtocolError` if the body isn't a pickle of as many fields, or the class refuses the values.
    """
    try:
        return kind(*pickle.loads(frame.body))
    except Exception as error:  # pickle raises all sorts
        text = f"a message of kind {frame.kind.name} has a malformed body of {len(frame.body)} bytes"
        raise ProtocolError(text) from error


class PickledBody:
    """Base of a dataclass whose fields are pickled together."""

    __slots__ = ()

    KIND: ClassVar[Kind]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(self.KIND, pickle.dumps(tuple(getattr(self, field.name) for field in fields(self))))

    @classmethod
    def unpack(cls: type[_Message], frame: Frame) -> _Message:
        """Return the message in a frame. See `unpacked`."""
        return unpacked(cls, frame)


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
class Identity(PickledBody):
    """The first message to a worker that has to tell the dataset which one it is."""

    KIND = Kind.IDENTITY

    worker_id: int
    num_workers: int
    """How many there are when it starts."""
    num_kept: int = 0
    """How many segments it gets of an earlier worker's."""


@dataclass(slots=True)
class StreamEnded(PickledBody):
    """The worker's shard of the stream had no batch left for its oldest task."""

    KIND = Kind.STREAM_ENDED

    generation: int
    sequence: int


@dataclass(slots=True)
class State(PickledBody):
    """The state of the worker's dataset after the batch that is announced next."""

    KIND = Kind.STATE

    snapshot: bytes
    """A `worker.torch_worker.Snapshot`, packed."""


class Batch(NamedTuple):
    """Announces a batch. `meta` is what the codec needs besides the bulk data in the slot."""

    generation: int
    meta: bytes
    """Empty if it is in the slot, at `meta_offset`."""
    sequence: int
    slot: int
    num_blocks: int
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
        return pack_frame(Kind.BATCH, pickle.dumps(tuple(self), pickle.HIGHEST_PROTOCOL), self.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> Batch:
        """Return the batch in a frame. See `unpacked`."""
        return unpacked(cls, frame)


@dataclass(slots=True)
class Ready(PickledBody):
    """The worker accepts tasks; the descriptor of its counters is attached."""

    KIND = Kind.READY

    length_address: int
    """Address in the worker's memory of a 64-bit word: the number of samples fetched for the current batch."""
    report: BuildReport
    """Describes the worker's dataset."""


@dataclass(slots=True)
class SegmentMade(PickledBody):
    """The worker made a slot; the descriptor of its memory is attached."""

    KIND = Kind.SEGMENT

    slot: int
    nbytes: int


@dataclass(slots=True)
class SegmentGone(PickledBody):
    """The worker has unmapped a free slot and won't use it again: the trainer should unmap it, too."""

    KIND = Kind.SEGMENT_GONE

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


# Between the trainer and a template, or a root. What a root forks, and how that ends, is told as by a template.


@dataclass(slots=True)
class Blank(PickledBody):
    """Asks to import modules and to fork a template. Without a channel attached, it asks for the imports only."""

    KIND = Kind.BLANK

    serial: int
    """The number of the request."""
    modules: tuple[str, ...]


@dataclass(slots=True)
class Warmed(PickledBody):
    """The modules of a request without a channel are imported."""

    KIND = Kind.WARMED

    serial: int


@dataclass(slots=True)
class Refused(PickledBody):
    """Says why there is no fork. The root forks no more."""

    KIND = Kind.REFUSED

    serial: int
    is_stale: bool
    """Whether only the source of a module has changed since its import, so that another root can do it."""
    reason: str


@dataclass(slots=True)
class Built(PickledBody):
    """The template has built the dataset. Says whether workers share it or each builds its own."""

    KIND = Kind.BUILT

    report: BuildReport
    reason: str
    """Why the dataset isn't shared; for the log. Empty if it is shared."""
    is_odd: bool
    """Whether the reason are threads, or what importing modules opened, of which the user is warned."""


@dataclass(slots=True)
class Fork(PickledBody):
    """Asks for a worker; its channel is attached."""

    KIND = Kind.FORK

    worker: int
    in_place: bool
    """True: the receiver becomes the worker instead of forking one."""


@dataclass(slots=True)
class Forked(PickledBody):
    """A worker was forked; its pidfd is attached."""

    KIND = Kind.FORKED

    worker: int
    pid: int


@dataclass(slots=True)
class Exited(PickledBody):
    """A forked worker is gone and reaped."""

    KIND = Kind.EXITED

    worker: int
    exit_code: int
    """As `os.waitstatus_to_exitcode` returns it: negative for a signal."""
