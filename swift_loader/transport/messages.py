"""The messages of trainer, workers, templates and roots, apart from tasks. Pure: no I/O, no clock.

A message travels as the name of its class and its fields, pickled together. Unpickling is safe, because the sender is a
process of ours on a private pipe.
"""

from __future__ import annotations

import pickle
from dataclasses import Field, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from swift_loader.errors import ProtocolError

if TYPE_CHECKING:
    from swift_loader.sampling.plan import PlanSettings


class Received(NamedTuple):
    """A message as it came. `data` is valid until the next `receive` on the same channel."""

    data: memoryview
    descriptors: list[int]
    """Owned by the caller of `receive`. Empty where the system can't send descriptors."""


_CLASSES: dict[str, Any] = {}
"""By name."""


class Message:
    """Base of a dataclass that can be sent."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls) -> None:
        _CLASSES[cls.__name__] = cls

    def pack(self) -> bytes:
        """Return the bytes of the message."""
        return packed(type(self).__name__, *(getattr(self, field.name) for field in fields(self)))


def packed(name: str, *values: Any) -> bytes:
    """Return the bytes of a message of this class with these fields."""
    return pickle.dumps((name, *values), pickle.HIGHEST_PROTOCOL)


def unpack(data: memoryview | bytes) -> Any:
    """Return the message in `data`.

    Raises `ProtocolError` if it isn't a pickle of as many fields, or the class refuses the values.
    """
    try:
        name, *values = pickle.loads(data)
        return _CLASSES[name](*values)
    except Exception as error:  # pickle raises all sorts
        text = f"a message of {len(data)} bytes that begins with {bytes(data[:8])!r} is malformed"
        raise ProtocolError(text) from error


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
class NewPlan(Message):
    """Sets the plan for the tasks of this generation and later ones."""

    generation: int
    settings: PlanSettings
    resume: bytes | None = None
    """Where the worker's dataset continues: a `worker.torch_worker.Resume`, packed. None: at its beginning."""
    turn: int = 0
    """Which batch of the worker's shard of a stream is the first one after that."""


@dataclass(slots=True)
class Hung(Message):
    """Names a sample at which a worker was killed. It fails in this epoch, so that it is left out or replaced."""

    epoch: int
    index: Any
    """Its dataset index."""
    why: str
    """The text of its `TimeoutError`."""
    num_replacements: int = 0
    """How many samples in its place hung, too."""


@dataclass(slots=True)
class Identity(Message):
    """The first message to a worker that has to tell the dataset which one it is."""

    worker_id: int
    num_workers: int
    """How many there are when it starts."""
    num_kept: int = 0
    """How many segments it gets of an earlier worker's."""


@dataclass(slots=True)
class NoBatch(Message):
    """The worker has none for its oldest task, which belonged to an abandoned epoch, or lay beyond its shard's end."""

    generation: int
    sequence: int


@dataclass(slots=True)
class State(Message):
    """The state of the worker's dataset after the batch that is announced next."""

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
    read_ns: int = 0
    """How long fetching waited for reads of a mapped dataset."""
    reading_ns: int = 0
    """How long those reads took, in sum."""
    reads_ahead: bool = False
    """Whether the worker reads for the tasks that it has."""

    def pack(self) -> bytes:
        """Return the bytes of the message."""
        return packed("Batch", *self)


_CLASSES["Batch"] = Batch


@dataclass(slots=True)
class Ready(Message):
    """The worker accepts tasks; the descriptor of its counters is attached."""

    length_address: int
    """Address in the worker's memory of a 64-bit word: the number of samples fetched for the current batch."""
    report: BuildReport
    """Describes the worker's dataset."""


@dataclass(slots=True)
class SegmentMade(Message):
    """The worker made a slot; the descriptor of its memory is attached."""

    slot: int
    nbytes: int


@dataclass(slots=True)
class SegmentGone(Message):
    """The worker has unmapped a free slot and won't use it again: the trainer should unmap it, too."""

    slot: int


@dataclass(slots=True)
class Failure(Message):
    """The user's code raised."""

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
class SampleFailed(Message):
    """A sample of the next announced batch failed, and isn't in the batch."""

    position: int
    """The sample's planned position in the batch."""
    replaced_by: int | None
    """The dataset index of the sample that replaces it; None if it was left out."""
    failure: Failure


# Between the trainer and a server: a template or the root.


@dataclass(slots=True)
class Fork(Message):
    """Asks for a fork, with its channel and pipes attached. The root, without them, is asked for the imports only."""

    serial: int
    """The number of the worker, or of the request to the root."""
    modules: tuple[str, ...] = ()
    """What the root imports before."""


@dataclass(slots=True)
class Forked(Message):
    """Says that a child was forked. A template attaches its pidfd."""

    serial: int
    pid: int


@dataclass(slots=True)
class Exited(Message):
    """Says that a child is gone and reaped."""

    serial: int
    exit_code: int
    """As `os.waitstatus_to_exitcode` returns it: negative for a signal."""


@dataclass(slots=True)
class Warmed(Message):
    """The modules of a request without a channel are imported."""

    serial: int


@dataclass(slots=True)
class Refused(Message):
    """Says why there is no fork. The root forks no more."""

    serial: int
    is_stale: bool
    """Whether only the source of a module has changed since its import, so that another root can do it."""
    reason: str


@dataclass(slots=True)
class Built(Message):
    """The template has built the dataset. Says whether workers share it or each builds its own."""

    report: BuildReport
    reason: str
    """Why the dataset isn't shared; for the log. Empty if it is shared."""
    is_odd: bool
    """Whether the reason are threads, or what importing modules opened, of which the user is warned."""


@dataclass(slots=True)
class PayloadRead(Message):
    """A worker that isn't a template's fork has read the payload. The first that it sends."""


@dataclass(slots=True)
class Become(Message):
    """Tells a template to be this worker from now on, on the same channel."""

    serial: int
