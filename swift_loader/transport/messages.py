"""The messages, as types. Pure: no I/O, no clock.

`unpack` raises `ProtocolError` for a body that `pack` doesn't write. It checks lengths before it reads anything.

`Task` and `Batch` are on the hot path and packed by hand. The others travel once per worker, segment or failure.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from swift_loader.errors import ProtocolError
from swift_loader.transport.bodies import FixedBody, PickledBody, malformed
from swift_loader.transport.frames import Frame, Kind, pack_frame
from swift_loader.transport.reports import BuildReport, Verdict

if TYPE_CHECKING:
    from swift_loader.sampling.plan import PlanSettings

__all__ = [
    "MAX_INLINE_BYTES",
    "NO_SLOT",
    "Batch",
    "Built",
    "Exited",
    "Failure",
    "Fork",
    "Forked",
    "Identity",
    "LostKeys",
    "NewPlan",
    "Ready",
    "Recheck",
    "SampleFailed",
    "SegmentGone",
    "SegmentMade",
    "Stage",
    "State",
    "StreamEnded",
    "Task",
    "Verdicts",
]

NO_SLOT = 0xFFFFFFFF
"""The slot number of a batch without bulk data."""

MAX_INLINE_BYTES = 16 * 1024
"""A batch's structure up to this size travels in the message; a larger one travels in the slot."""

MAX_SLOTS_PER_TASK = 1024
"""Maximum number of released slots that one task names; the others go into the next task."""

_TASK = struct.Struct("<QqqIIi")
_SLOT_NBYTES = 4
_INDEX_NBYTES = 8
_PLANNED = -1
"""The number of indices of a task whose indices the worker computes."""
_PICKLED = -2
"""The same for keys that aren't a list of small integers."""
_STREAM = -3
"""The same for a batch of a stream, which has a turn instead."""
_TURN = struct.Struct("<q")
_INTEGERS = frozenset({int})
_BATCH = struct.Struct("<QIIQIIQQQQ")


@lru_cache(64)  # all tasks of a loop have a few layouts; making one anew would take as long as packing
def _layout(num_slots: int) -> struct.Struct:
    """Return the layout of the slots that come after a task's head."""
    return struct.Struct(f"<{num_slots}I")


class Stage(str, Enum):
    """What a worker was doing when an exception was raised."""

    BUILD = "building the dataset"
    SET_UP = "setting up the worker"
    FETCH = "fetching a sample"
    COLLATE = "collating a batch"
    ENCODE = "encoding a batch"
    SAVE = "saving the dataset's state"
    LOAD = "restoring the dataset's state"


@dataclass(frozen=True, slots=True)
class LostKeys:
    """Stands for keys that can't be pickled, or not be rebuilt in the worker."""

    reason: str


@dataclass(slots=True)
class Task:
    """Asks for one batch."""

    generation: int
    """0: the trial batch. It belongs to no run of the loop, so it is never skipped."""
    sequence: int
    """Number of the batch within its generation, in the order of delivery."""
    epoch: int
    step: int
    indices: Any = None
    """What a sampler chose: a list of dataset indices, other keys of the dataset, or a single key. None: the worker
    computes the indices from its plan, `epoch` and `step`. `LostKeys` if they couldn't be sent."""
    released: Sequence[int] = ()
    """Slots whose batches the user has dropped: the worker may write to them again."""
    retired: Sequence[int] = ()
    """Slots that the trainer has unmapped: the worker should unmap them, too."""
    turn: int | None = None
    """Which batch of the worker's shard of a stream, see `StreamWork`. None: the batch isn't of a stream."""

    def pack(self) -> bytes:
        """Return the frame."""
        released, retired, indices = self.released, self.retired, self.indices
        num_released, num_retired = len(released), len(retired)
        num_indices, chosen = _PLANNED, b""
        if indices is not None:
            num_indices, chosen = _pack_keys(indices)
        elif self.turn is not None:
            num_indices, chosen = _STREAM, _TURN.pack(self.turn)
        slots = _layout(num_released + num_retired).pack(*released, *retired)
        head = _TASK.pack(self.sequence, self.epoch, self.step, num_released, num_retired, num_indices)
        return pack_frame(Kind.TASK, head + slots + chosen, self.generation)

    @classmethod
    def unpack(cls, frame: Frame) -> Task:
        """Return the task in a frame."""
        generation, body = frame.generation, frame.body
        if len(body) < _TASK.size:
            raise malformed(frame)
        sequence, epoch, step, num_released, num_retired, num_indices = _TASK.unpack_from(body)
        num_slots = num_released + num_retired
        end = _TASK.size + num_slots * _SLOT_NBYTES
        chosen = body[end:]
        if len(body) < end or (num_indices != _PICKLED and len(chosen) != _nbytes_chosen(num_indices, frame)):
            raise malformed(frame)
        slots = _layout(num_slots).unpack_from(body, _TASK.size)
        task = cls(generation, sequence, epoch, step, None, slots[:num_released], slots[num_released:])
        if num_indices >= 0:
            task.indices = list(struct.unpack(f"<{num_indices}q", chosen))
        elif num_indices == _PICKLED:
            task.indices = _unpickle_keys(chosen)
        elif num_indices == _STREAM:
            (task.turn,) = _TURN.unpack(chosen)
        return task


def _pack_keys(keys: Any) -> tuple[int, bytes]:
    """Return the number of indices of a task and how they travel; `_PICKLED` for all but a list of small integers."""
    if type(keys) is list and set(map(type, keys)) <= _INTEGERS:
        try:
            return len(keys), struct.pack(f"<{len(keys)}q", *keys)
        except struct.error:  # one has more than 64 bits
            pass
    try:
        return _PICKLED, pickle.dumps(keys, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the user's classes raise all sorts; the batch gets the error
        reason = f"the keys of a batch, a {type(keys).__name__}, can't be sent: {type(error).__name__}: {error}"
        return _PICKLED, pickle.dumps(LostKeys(reason))


def _unpickle_keys(pickled: memoryview) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        return LostKeys(f"the keys of a batch can't be rebuilt in the worker: {type(error).__name__}: {error}")


def _nbytes_chosen(num_indices: int, frame: Frame) -> int:
    """Return how many bytes come after the slots of a task whose keys aren't pickled."""
    if num_indices < _STREAM:
        raise malformed(frame)
    return num_indices * _INDEX_NBYTES if num_indices >= 0 else _TURN.size * (num_indices == _STREAM)


@dataclass(slots=True)
class NewPlan(PickledBody):
    """Sets the plan for the tasks of this generation and later ones."""

    KIND = Kind.PLAN

    generation: int
    settings: PlanSettings
    resume: bytes | None = None
    """Where the worker's dataset continues: a `worker.torch_mode.Resume`, packed. None: at its beginning."""
    turn: int = 0
    """Which batch of the worker's shard of a stream is the first one after that."""


@dataclass(slots=True)
class Identity(FixedBody):
    """The first message to a worker that has to tell the dataset which one it is."""

    KIND = Kind.IDENTITY
    LAYOUT = struct.Struct("<I")

    worker_id: int


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
    """A `worker.torch_mode.Snapshot`, packed."""


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
