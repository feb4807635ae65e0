"""The message that asks a worker for a batch. Pure: no I/O, no clock.

It is on the hot path and packed by hand. `unpack` checks lengths before it reads anything.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.messages import Frame, Kind, malformed, pack_frame

# The dataset indices of a batch as an array. Pure.


class IndexArray:
    """Stands for a list of integers, on its way to a worker.

    A list of 256 takes 12 us to be made, checked and packed; the array takes 0.5 us. What a user's sampler gives
    is never replaced by this: a dataset gets keys of the types that the sampler chose.
    """

    __slots__ = ("_values",)

    def __init__(self, values: NDArray[np.int64]) -> None:
        """Take over `(n,) int64`."""
        self._values = values

    def to_list(self) -> list[int]:
        """Return the integers, as the dataset gets them."""
        numbers: list[int] = self._values.tolist()
        return numbers

    def to_bytes(self) -> bytes:
        """Return them as little-endian 64-bit words."""
        return self._values.astype("<i8", copy=False).tobytes()

    def __len__(self) -> int:
        return len(self._values)


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


@lru_cache(64)  # all tasks of a loop have a few layouts; making one anew would take as long as packing
def _layout(num_slots: int) -> struct.Struct:
    """Return the layout of the slots that come after a task's head."""
    return struct.Struct(f"<{num_slots}I")


@dataclass(frozen=True, slots=True)
class LostKeys:
    """Stands for keys that can't be pickled, or not be rebuilt in the worker."""

    reason: str


@dataclass(slots=True)
class Task:
    """Asks for one batch."""

    generation: int
    sequence: int
    """Number of the batch within its generation, in the order of delivery."""
    epoch: int
    step: int
    indices: Any = None
    """What a sampler chose: a list of dataset indices, an `IndexArray` of them that `unpack` returns as a list, other
    keys of the dataset, or a single key. None: the worker computes the indices from its plan, `epoch` and `step`.
    `LostKeys` if they couldn't be sent."""
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
    if type(keys) is IndexArray:
        return len(keys), keys.to_bytes()
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
