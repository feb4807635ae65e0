"""torch's default collate for a batch that is sent: what becomes a tensor is an array until it arrives.

torch's calls take longer than NumPy's, and the trainer makes the tensor anyway, over the memory that the array lies in.
The usual samples are collated here: arrays, numbers, text and tensors in dicts, lists and tuples, of exactly these
types. Then nobody sees the arrays before they are sent: no class of the user's, and no function that he registered.
`torch_collate` does all others, and raises all errors.

Runs in workers. torch is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.collate import ARRAY_TYPES, BatchMemory
from swift_loader.batch.torch_collate import (
    REFUSALS,
    are_functions_torchs,
    has_torch_dtype,
    keeps_scalars,
    stack_tensors,
    torch_collate,
    write_arrays,
)

_dtype_of, _shape_of, _nbytes_of, _ndim_of = map(attrgetter, ("dtype", "shape", "nbytes", "ndim"))


class SendMemory(BatchMemory, Protocol):
    """Memory of a batch that is sent."""

    used: int
    """How many bytes are allocated."""

    def empty_for_tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any], /) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array that arrives as a tensor."""
        ...

    def rewind(self, used: int, /) -> None:
        """Forget what was allocated since so many bytes were."""
        ...


def collate_to_send(samples: Sequence[Any], memory: SendMemory | None = None) -> Any:
    """Return a batch that arrives as what `torch.utils.data.default_collate` returns for these samples, at least one.

    `memory` None: the batch isn't sent, so it has tensors. Raises what torch raises, with its message.
    """
    if memory is not None and are_functions_torchs():
        used = memory.used
        try:
            return _collate(samples, memory)
        except _UnusualError:
            memory.rewind(used)
    return torch_collate(samples, memory)


class _UnusualError(Exception):
    """Samples that `torch_collate` must collate."""


def _collate(parts: Sequence[Any], memory: SendMemory) -> Any:
    """Collate the parts that all samples have at one place."""
    kinds = set(map(type, parts))
    if len(kinds) != 1:
        raise _UnusualError
    (kind,) = kinds
    collate = _BY_TYPE.get(kind)
    if collate is not None:
        return collate(parts, memory)
    if issubclass(kind, np.generic) and keeps_scalars(kind):
        return _collate_numbers(parts, memory, np.dtype(kind))
    collated = stack_tensors(parts, memory)
    if collated is None:
        raise _UnusualError
    return collated


def _collate_dicts(dicts: Sequence[Any], memory: SendMemory) -> dict[Any, Any]:
    try:
        return {key: _collate([one[key] for one in dicts], memory) for key in dicts[0]}
    except KeyError:
        raise _UnusualError from None


def _collate_sequences(sequences: Sequence[Any], memory: SendMemory) -> list[Any]:
    if len(set(map(len, sequences))) != 1:
        raise _UnusualError
    return [_collate(column, memory) for column in zip(*sequences, strict=True)]


def _collate_texts(texts: Sequence[Any], memory: SendMemory) -> Sequence[Any]:  # noqa: ARG001 - they need no memory
    return texts


def _collate_numbers(numbers: Sequence[Any], memory: SendMemory, dtype: np.dtype[Any]) -> NDArray[Any]:
    batch = memory.empty_for_tensor((len(numbers),), dtype)
    try:
        batch[:] = numbers
    except OverflowError:
        raise _UnusualError from None
    return batch


def _collate_arrays(arrays: Sequence[Any], memory: SendMemory) -> NDArray[Any]:
    first = arrays[0]
    # Equal sizes tell equal shapes of one axis. NumPy makes a tuple for each shape that it is asked for.
    is_flat = first.ndim == 1
    same = (_dtype_of, _nbytes_of, _ndim_of) if is_flat else (_dtype_of, _shape_of)
    if not first.size or any(len(set(map(of, arrays))) > 1 for of in same) or not has_torch_dtype(first.dtype):
        raise _UnusualError
    try:
        batch = memory.empty_for_tensor((len(arrays), *first.shape), first.dtype)
    except REFUSALS:  # NumPy allows no more axes
        raise _UnusualError from None
    if not write_arrays(batch, arrays):
        raise _UnusualError
    return batch


def _numbers_as(dtype: type) -> Callable[[Sequence[Any], SendMemory], NDArray[Any]]:
    def collate(numbers: Sequence[Any], memory: SendMemory) -> NDArray[Any]:
        return _collate_numbers(numbers, memory, np.dtype(dtype))

    return collate


_BY_TYPE: dict[type, Callable[[Sequence[Any], SendMemory], Any]] = {
    dict: _collate_dicts,
    list: _collate_sequences,
    tuple: _collate_sequences,
    str: _collate_texts,
    bytes: _collate_texts,
    int: _numbers_as(np.int64),
    float: _numbers_as(np.float64),
    bool: _numbers_as(np.bool_),
    **dict.fromkeys(ARRAY_TYPES, _collate_arrays),
}
