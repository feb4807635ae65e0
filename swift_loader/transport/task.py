"""The message that asks a worker for a batch. Pure: no I/O, no clock."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import EncodeError
from swift_loader.transport.messages import Message

# The dataset indices of a batch as an array. Pure.


@dataclass(frozen=True, slots=True, eq=False)
class IndexArray:
    """Stands for a list of integers, on its way to a worker.

    A list of 256 takes 8 us to be made and packed; the array takes 0.5 us. What a user's sampler gives
    is never replaced by this: a dataset gets keys of the types that the sampler chose.
    """

    values: NDArray[np.int64]

    def to_list(self) -> list[int]:
        """Return the integers, as the dataset gets them."""
        numbers: list[int] = self.values.tolist()
        return numbers


MAX_SLOTS_PER_TASK = 1024
"""Maximum number of released slots that one task names; the others go into the next task."""


@dataclass(frozen=True, slots=True)
class LostKeys:
    """Stands for keys that can't be pickled, or not be rebuilt in the worker."""

    reason: str


@dataclass(slots=True)
class Task(Message):
    """Asks for one batch."""

    generation: int
    sequence: int
    """Number of the batch within its generation, in the order of delivery."""
    epoch: int
    step: int
    indices: Any = None
    """What a sampler chose: a list of dataset indices, an `IndexArray` of them that arrives as a list, other keys of
    the dataset, or a single key. None: the worker computes the indices from its plan, `epoch` and `step`. `LostKeys` if
    they couldn't be sent."""
    released: Sequence[int] = ()
    """Slots whose batches the user has dropped: the worker may write to them again."""
    retired: Sequence[int] = ()
    """Slots that the trainer has unmapped: the worker should unmap them, too."""
    turn: int | None = None
    """Which batch of the worker's shard of a stream, see `StreamWork`. None: the batch isn't of a stream."""

    def pack(self) -> bytes:
        """Return the bytes of the message. This is on the hot path, so the fields are listed."""
        keys, is_array = self.indices, type(self.indices) is IndexArray
        chosen = keys.values.astype("<i8").tobytes() if is_array else None if keys is None else _pickled(keys)
        # Keys are pickled apart: what goes wrong with them is an error of their batch.
        where = self.generation, self.sequence, self.epoch, self.step
        fields = ("Task", *where, (chosen, is_array), self.released, self.retired, self.turn)
        return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)

    def rebuild_keys(self) -> None:
        """Rebuild the keys, once, of a task that has arrived."""
        try:
            chosen, is_array = self.indices
            self.indices = np.frombuffer(chosen, "<i8").tolist() if is_array else chosen and pickle.loads(chosen)
        except Exception as error:
            reason = f"the keys of a batch can't be rebuilt in the worker: {type(error).__name__}: {error}"
            self.indices = LostKeys(reason)


def _pickled(keys: Any) -> bytes:
    try:
        return pickle.dumps(keys, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the user's classes raise all sorts; the batch gets the error
        reason = f"the keys of a batch, a {type(keys).__name__}, can't be sent: {type(error).__name__}: {error}"
        raise EncodeError(reason) from error
