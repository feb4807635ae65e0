"""The default collate: makes a batch from samples.

Arrays stay arrays, and tensors stay tensors. Python and NumPy numbers become arrays, or tensors if the sample has a
tensor. Everything else becomes a list.
list, tuple, dict, namedtuple, dataclass and Mapping keep their type, at any depth. Arrays and tensors are written
directly into the given memory. Pure, apart from that memory. Runs in the worker. Uses torch only if the samples have
tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from swift_loader.batch.tree import children, rebuilt, steps

if TYPE_CHECKING:
    import torch


class BatchMemory(Protocol):
    """Allocates the arrays and tensors of a batch."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, /) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array."""
        ...

    def empty_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor:
        """Return an uninitialised contiguous tensor."""
        ...


class HeapMemory:
    """A `BatchMemory` on the heap, for calling `default_collate` outside a loader."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, /) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array."""
        return np.empty(shape, dtype)

    def empty_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor:
        """Return an uninitialised contiguous tensor."""
        import torch

        return torch.empty(shape, dtype=dtype, device="cpu")


Collate = Callable[[Sequence[Any], BatchMemory], Any]
"""Makes a batch from samples, in the given memory."""


def collate_into(collate_fn: Callable[..., Any] | None) -> Collate:
    """Return a collate function in the form that the loader calls; None means the default collate.

    If `collate_fn` has a parameter `memory`, as `default_collate` does, it gets the memory that the batch is sent in.
    Arrays that it makes there aren't copied again. Otherwise it gets only the samples, as a list.
    """
    if collate_fn is None:
        return default_collate
    if takes_memory(collate_fn):
        return lambda samples, memory: collate_fn(list(samples), memory=memory)
    return lambda samples, memory: collate_fn(list(samples))  # noqa: ARG005 - the user's function doesn't take it


def takes_memory(collate_fn: Callable[..., Any]) -> bool:
    """Return whether a collate function has the parameter `memory`."""
    try:
        return "memory" in inspect.signature(collate_fn).parameters
    except (TypeError, ValueError):  # some C callables have no signature
        return False


ARRAY_TYPES = frozenset({np.ndarray, np.memmap})
"""Other subclasses (masked arrays, matrices) would lose their special properties, so they go into lists."""

_SMALL_NBYTES = 2048
"""Arrays up to this size are joined as bytes first: 18 us instead of 55 us for 256 arrays of 64 bytes. For larger
arrays, the second copy costs more than it saves."""

_NUMBER_TYPES = (bool, int, float, complex, np.bool_, np.number, np.datetime64, np.timedelta64)


def default_collate(samples: Sequence[Any], memory: BatchMemory | None = None) -> Any:
    """Return the samples as one batch.

    Args:
        samples: At least one sample; all have the same structure.
        memory: Where to put arrays and tensors; None: on the heap.

    Returns:
        The structure of a sample, with leaves of shape `(len(samples), *leaf.shape)`.

    Raises:
        ValueError: Structures, lengths or shapes differ, and the message names the path and the difference; or there is
            no sample.
    """
    if not samples:
        raise ValueError("a batch of no samples can't be collated; pass at least one")
    torch = sys.modules.get("torch")
    has_tensor = torch is not None and _has_tensor(samples[0], torch)
    return _collate(samples, memory or HeapMemory(), "sample", torch if has_tensor else None)


def _has_tensor(thing: Any, torch: ModuleType) -> bool:
    inside = children(thing)
    return isinstance(thing, torch.Tensor) if inside is None else any(_has_tensor(one, torch) for one in inside)


def _collate(parts: Sequence[Any], memory: BatchMemory, path: str, torch: ModuleType | None) -> Any:
    """Collate the parts that all samples have at `path`. `torch`: None if there is no tensor anywhere."""
    first = parts[0]
    kind = type(first)
    if kind in ARRAY_TYPES:
        return _collate_arrays(parts, memory, path)
    if torch is not None and isinstance(first, torch.Tensor):
        return _collate_tensors(parts, memory, path, torch)
    if isinstance(first, _NUMBER_TYPES):
        return _collate_numbers(parts, memory, torch)
    if isinstance(first, Mapping):
        columns: Iterable[Sequence[Any]] = _columns_of_mappings(parts, path)
    elif children(first) is None or len(set(map(type, parts))) > 1:
        return list(parts)
    else:
        columns = _columns(parts, path)
    named = zip(steps(first), columns, strict=True)
    collated = [_collate(column, memory, path + step, torch) for step, column in named]
    return rebuilt(first, collated)


def _columns_of_mappings(mappings: Sequence[Any], path: str) -> list[list[Any]]:
    """Return the values of all samples for each key of the first sample, in its order."""
    first = mappings[0]
    keys, kind = first.keys(), type(first)
    for number, mapping in enumerate(mappings):
        is_mapping = type(mapping) is kind or isinstance(mapping, Mapping)
        if not is_mapping or mapping.keys() != keys:
            found = sorted(map(repr, mapping)) if is_mapping else type(mapping).__name__
            raise _mismatch(path, f"the keys {sorted(map(repr, first))}", f"{found} in sample {number} of the batch")
    return [[mapping[key] for mapping in mappings] for key in first]


def _columns(containers: Sequence[Any], path: str) -> Iterator[tuple[Any, ...]]:
    """Return the parts of all samples at each place of a list or tuple, or for each field of a dataclass."""
    rows = containers if isinstance(containers[0], (list, tuple)) else [children(each) or () for each in containers]
    if len(set(map(len, rows))) > 1:
        raise _ragged(path, [len(row) for row in rows])
    return zip(*rows, strict=True)


def _collate_arrays(arrays: Sequence[Any], memory: BatchMemory, path: str) -> Any:
    if not ARRAY_TYPES.issuperset(map(type, arrays)):
        return list(arrays)
    first = arrays[0]
    shape, dtype = first.shape, first.dtype
    if len({array.shape for array in arrays}) > 1:
        raise _ragged(path, [array.shape for array in arrays])
    mixed = len({array.dtype for array in arrays}) > 1
    if mixed:
        dtype = np.result_type(*arrays)
    if dtype.hasobject:
        return np.stack(arrays)
    batch = memory.empty((len(arrays), *shape), dtype)
    write_rows(batch, arrays, alike=not mixed)
    return batch


def write_rows(batch: NDArray[Any], arrays: Sequence[Any], *, alike: bool) -> None:
    """Write at least one array, all of one shape, one after another into the C-contiguous `(len(arrays), *shape)`.

    `alike`: all arrays have the batch's dtype.
    """
    first = arrays[0]
    if not first.shape:
        batch[...] = arrays
    elif not (alike and join_into(batch, arrays)):
        # Concatenation along the first axis writes the same bytes as np.stack, in a third of the time.
        np.concatenate(arrays, axis=0, out=batch.reshape(len(arrays) * first.shape[0], *first.shape[1:]))


def join_into(batch: NDArray[Any], arrays: Sequence[Any]) -> bool:
    """Write small contiguous arrays of the batch's dtype and the same shape in sequence; False: there are others."""
    if arrays[0].nbytes > _SMALL_NBYTES or batch.dtype.kind in "mMV":  # times have no buffer format
        return False
    try:
        joined = b"".join(arrays)
    except (ValueError, BufferError, TypeError):  # not contiguous, or a dtype without the buffer protocol
        return False
    batch.reshape(-1).view(np.uint8)[:] = np.frombuffer(joined, np.uint8)
    return True


def _collate_tensors(tensors: Sequence[Any], memory: BatchMemory, path: str, torch: ModuleType) -> Any:
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return list(tensors)
    first = tensors[0]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise _ragged(path, [tuple(tensor.shape) for tensor in tensors])
    alike = all(tensor.dtype == first.dtype and tensor.layout is torch.strided for tensor in tensors)
    with torch.no_grad():
        if not alike or first.device.type != "cpu" or first.is_quantized:
            return torch.stack(list(tensors))
        batch = memory.empty_tensor((len(tensors), *first.shape), first.dtype)
        return torch.stack(list(tensors), out=batch)


def _collate_numbers(numbers: Sequence[Any], memory: BatchMemory, torch: ModuleType | None) -> Any:
    if not all(isinstance(number, _NUMBER_TYPES) for number in numbers):
        return list(numbers)
    values = np.asarray(numbers)
    whole = all(isinstance(number, (int, np.integer)) for number in numbers)
    if values.dtype.hasobject or (whole and values.dtype.kind == "f"):  # no integer dtype holds all of them
        return list(numbers)
    if torch is not None:
        with suppress(TypeError):  # torch has no such dtype: times stay an array
            tensor = torch.from_numpy(values)
            return memory.empty_tensor(values.shape, tensor.dtype).copy_(tensor)
    batch = memory.empty(values.shape, values.dtype)
    batch[...] = values
    return batch


def _ragged(path: str, found: list[Any]) -> ValueError:
    odd = next(number for number, shape in enumerate(found) if shape != found[0])
    what = "length" if isinstance(found[0], int) else "shape"
    return _mismatch(path, f"{what} {found[0]}", f"{found[odd]} in sample {odd} of the batch")


def _mismatch(path: str, expected: str, found: str) -> ValueError:
    return ValueError(
        f"{path}: sample 0 of the batch has {expected}, but there is {found}. All samples of a batch must have the "
        f"same structure and shapes; pad or crop them in the dataset, or pass a collate_fn"
    )
