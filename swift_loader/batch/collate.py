"""How samples become a batch: the loader's default collate, and torch's.

`default_collate`, for SwiftLoader: arrays stay arrays, and tensors stay tensors. Python and NumPy numbers become
arrays, or tensors if the sample has a tensor. Everything else becomes a list. list, tuple, dict, namedtuple, dataclass
and Mapping keep their type, at any depth.

`torch_collate`, what torch's `default_collate` gives: its own `collate` walks the samples. Only the functions that
collate leaves are replaced: tensors, arrays and numbers. Each of ours writes the usual case into the batch's memory,
and calls torch's own for any other case. So types, dtypes, values and errors are torch's. Functions that the user
registered in `default_collate_fn_map` are called as torch calls them.

`collate_to_send`, the same for a batch that is sent: what becomes a tensor is an array until it arrives. torch's calls
take longer than NumPy's, and the trainer makes the tensor anyway, over the memory that the array lies in. It collates
the usual samples: arrays, numbers, text and tensors in dicts, lists and tuples, of exactly these types. Then nobody
sees the arrays before they are sent: no class of the user's, and no function that he registered. `torch_collate` does
all others, and raises all errors.

Arrays and tensors are written directly into the given memory. Pure, apart from that memory. Runs in workers and in the
trainer. `default_collate` uses torch only if the samples have tensors; the other two import it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from operator import attrgetter, itemgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from swift_loader.batch.tree import ATOMS, children, rebuilt, steps, type_name

if TYPE_CHECKING:
    import torch


class BatchMemory:
    """Allocates the arrays and tensors of a batch. A `collate_fn` gets it by a parameter `memory: BatchMemory`.

    In a worker, this is the memory in which the batch is sent. The class itself allocates on the heap.
    """

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, /) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array."""
        return np.empty(shape, dtype)

    def empty_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor:
        """Return an uninitialised contiguous tensor."""
        import torch

        return torch.empty(shape, dtype=dtype, device="cpu")


class SendMemory(BatchMemory):
    """Memory of a batch that is sent."""

    used = 0
    """How many bytes are allocated."""

    def empty_for_tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any], /) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array that arrives as a tensor."""
        raise NotImplementedError

    def rewind(self, used: int, /) -> None:
        """Forget what was allocated since so many bytes were."""
        raise NotImplementedError


Collate = Callable[[Any, BatchMemory], Any]
"""Makes a batch from samples, in the given memory."""


def collate_into(collate_fn: Callable[..., Any] | None) -> Collate:
    """Return a collate function in the form that the loader calls; None means the default collate.

    If `collate_fn` has a parameter `memory` that is annotated with `BatchMemory`, as `default_collate` has, it gets the
    memory that the batch is sent in. Arrays that it makes there aren't copied again. Otherwise it gets only the
    samples: any other parameter is the user's.
    """
    if collate_fn is None or collate_fn is collate_to_send:
        return collate_fn or default_collate
    with suppress(Exception):  # some C callables have no signature, and a user's `__signature__` may raise
        parameter = inspect.signature(collate_fn, follow_wrapped=False).parameters.get("memory")
        is_bound = "memory" in getattr(collate_fn, "keywords", ())  # of a partial
        if parameter is not None and not is_bound and re.search(r"\bBatchMemory\b", str(parameter.annotation)):
            return lambda samples, memory: collate_fn(samples, memory=memory)
    return lambda samples, memory: collate_fn(samples)  # noqa: ARG005 - the user's function doesn't take it


# Arrays and tensors of one kind ---------------------------------------------------------------------------------------

ARRAY_TYPES = frozenset({np.ndarray, np.memmap})
"""Other subclasses (masked arrays, matrices) would lose their special properties, so they go into lists."""

_JOINED_NBYTES = 2048
"""Arrays up to this size are joined as bytes first: 18 us instead of 55 us for 256 arrays of 64 bytes. For larger
arrays, the second copy costs more than it saves."""

_COPIED_NBYTES = 1 << 16
"""Batches of tensors up to this size are stacked on the heap and copied: torch finds out itself whether their dtypes
differ. The copy takes 5 us, and asking 256 tensors for their dtype 14 us. For larger batches, the copy costs more."""

_REFUSALS = (TypeError, ValueError, RuntimeError, OverflowError)
"""What torch and NumPy raise for leaves that can't be collated. torch's own function then says why."""

_dtype_of, _ndim_of, _shape_of, _strides_of = map(attrgetter, ("dtype", "ndim", "shape", "strides"))


def _have_one_shape(arrays: Sequence[Any]) -> bool:
    # Equal lengths tell equal shapes of one axis. NumPy makes a tuple for each shape that it is asked for.
    if arrays[0].ndim == 1 and set(map(_ndim_of, arrays)) == {1}:
        return len(set(map(len, arrays))) == 1
    return len(arrays) == 1 or len(set(map(_shape_of, arrays))) == 1


def _write_rows(batch: NDArray[Any], arrays: Sequence[Any], *, alike: bool) -> None:
    """Write at least one array, all of one shape, one after another into the C-contiguous `(len(arrays), *shape)`.

    `alike`: all arrays have the batch's dtype.
    """
    shape = arrays[0].shape
    if not shape:
        batch[...] = arrays
    elif len(arrays) == 1:
        batch[0] = arrays[0]
    elif not (alike and _join_into(batch, arrays)):
        # Concatenation along the first axis writes the same bytes as np.stack, in a third of the time.
        np.concatenate(arrays, axis=0, out=batch.reshape(len(arrays) * shape[0], *shape[1:]))


def _join_into(batch: NDArray[Any], arrays: Sequence[Any]) -> bool:
    """Write small contiguous arrays of the batch's dtype and the same shape in sequence; False: there are others."""
    if arrays[0].nbytes > _JOINED_NBYTES or batch.dtype.kind in "mMV":  # times have no buffer format
        return False
    try:
        joined = b"".join(arrays)
    except (ValueError, BufferError, TypeError):  # not contiguous, or a dtype without the buffer protocol
        return False
    batch.reshape(-1).view(np.uint8)[:] = np.frombuffer(joined, np.uint8)
    return True


def _write_as_torch(batch: NDArray[Any], arrays: Sequence[Any]) -> bool:
    """Write arrays of one dtype and shape into a batch; return False if torch refuses their strides."""
    # Contiguous arrays have the strides that torch accepts, but those of axes with one element may be anything.
    if len(arrays) > 1 and min(arrays[0].shape, default=0) > 1 and _join_into(batch, arrays):
        return True
    size = arrays[0].itemsize
    if any(step < 0 or step % size for strides in set(map(_strides_of, arrays)) for step in strides):
        return False
    _write_rows(batch, arrays, alike=True)
    return True


def _suit_torch(arrays: Sequence[Any]) -> bool:
    """Return whether arrays, not empty, have one dtype, which torch has, too, and one shape."""
    first = arrays[0]
    if not first.size or _torch_dtype(first.dtype) is None:
        return False
    return (len(arrays) == 1 or len(set(map(_dtype_of, arrays))) == 1) and _have_one_shape(arrays)


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's dtype for NumPy's; None if there is none."""
    import torch

    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except _REFUSALS:
        return None


def _stacked(tensors: Sequence[Any], memory: BatchMemory | None, torch: ModuleType) -> torch.Tensor | None:
    """Return dense tensors as a batch; None: they have several dtypes, require grad, or only torch can stack them."""
    first = tensors[0]
    if first.layout is not torch.strided or not first.is_cpu or first.is_quantized:
        return None
    out: Any = None
    try:
        if (
            memory is not None
            and first.nbytes * len(tensors) > _COPIED_NBYTES
            and set(map(type, tensors)) == {torch.Tensor}
            and len(set(map(_dtype_of, tensors))) == 1
        ):
            out = memory.empty_tensor((len(tensors), *first.shape), first.dtype)
        batch = torch.stack(tensors, 0, out=out)
    except _REFUSALS:
        return None
    if batch.dtype is not first.dtype or batch.requires_grad:
        return None
    return _placed(batch, memory, torch) if out is None else out


def _placed(tensor: torch.Tensor, memory: BatchMemory | None, torch: ModuleType) -> torch.Tensor:
    """Return a copy of a dense tensor in `memory`; for None or a subclass, the tensor itself."""
    if memory is None or type(tensor) is not torch.Tensor or not tensor.is_cpu:
        return tensor
    return memory.empty_tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)


# The loader's default -------------------------------------------------------------------------------------------------

_NUMBER_TYPES = (bool, int, float, complex, np.bool_, np.number, np.datetime64, np.timedelta64)

_TENSORLESS = ATOMS | ARRAY_TYPES


class _MismatchError(Exception):
    """Samples whose structures or shapes differ: what sample 0 has, and what another has. The path grows on its way."""

    def __init__(self, expected: str, found: str) -> None:
        self.path = ""
        self.text = f"sample 0 of the batch has {expected}, but there is {found}"


def default_collate(samples: Sequence[Any], memory: BatchMemory | None = None) -> Any:
    """Return the samples as one [batch](datasets.md#batches).

    Args:
        samples: At least one sample. All have the same structure.
        memory: Where to put arrays and tensors. None: on the heap.

    Returns:
        The structure of a sample, with leaves of shape `(len(samples), *leaf.shape)`.

    Raises:
        ValueError: Structures, lengths or shapes differ, and the message names the path and the difference; or there is
            no sample.
    """
    torch = sys.modules.get("torch")
    given: Any = samples
    if not isinstance(given, Sequence):
        if not isinstance(given, np.ndarray) and (torch is None or not isinstance(given, torch.Tensor)):
            raise _whole(given)
        samples = list(given)
    if not samples:
        raise ValueError("a batch of no samples can't be collated; pass at least one")
    has_tensor = torch is not None and _has_tensor(samples[0], torch)
    try:
        return _collate(samples, memory or BatchMemory(), torch if has_tensor else None)
    except _MismatchError as mismatch:
        raise ValueError(
            f"sample{mismatch.path}: {mismatch.text}. All samples of a batch must have the same structure and shapes; "
            f"pad or crop them in the dataset, or pass a collate_fn"
        ) from None


def _whole(batch: Any) -> TypeError:
    return TypeError(
        f"a {type_name(batch)} is no list of samples, which default collating takes. Have the dataset's __getitems__ "
        f"return one sample per index. If it returns whole batches, pass a collate_fn. It gets what __getitems__ "
        f"returned, so a function that returns its argument keeps that"
    )


def _has_tensor(thing: Any, torch: ModuleType) -> bool:
    if type(thing) in _TENSORLESS:
        return False
    inside = children(thing)
    return isinstance(thing, torch.Tensor) if inside is None else any(_has_tensor(one, torch) for one in inside)


def _collate(parts: Sequence[Any], memory: BatchMemory, torch: ModuleType | None) -> Any:
    """Collate the parts that all samples have at one place. `torch`: None if there is no tensor anywhere."""
    first, kinds = parts[0], set(map(type, parts))
    kind = type(first)
    if kind in ARRAY_TYPES:
        return _collate_arrays(parts, memory) if kinds <= ARRAY_TYPES else list(parts)
    if torch is not None and issubclass(kind, torch.Tensor):
        are_tensors = all(issubclass(each, torch.Tensor) for each in kinds)
        return _collate_tensors(parts, memory, torch) if are_tensors else list(parts)
    if issubclass(kind, _NUMBER_TYPES):
        are_numbers = all(issubclass(each, _NUMBER_TYPES) for each in kinds)
        return _collate_numbers(parts, kinds, memory, torch) if are_numbers else list(parts)
    if isinstance(first, Mapping):
        columns: Any = _columns_of_mappings(parts)
    elif children(first) is None or len(kinds) > 1:
        return list(parts)
    else:
        rows = parts if isinstance(first, (list, tuple)) else [children(each) or () for each in parts]
        if len(set(map(len, rows))) > 1:
            raise _ragged([len(row) for row in rows])
        columns = zip(*rows, strict=True)
    collated: list[Any] = []
    try:
        for column in columns:
            collated.append(_collate(column, memory, torch))  # noqa: PERF401 - its length tells where it went wrong
    except _MismatchError as mismatch:
        mismatch.path = list(steps(first))[len(collated)] + mismatch.path
        raise
    return rebuilt(first, collated)


def _columns_of_mappings(mappings: Sequence[Any]) -> list[list[Any]]:
    """Return the values of all samples for each key of the first sample, in its order."""
    first = mappings[0]
    if set(map(type, mappings)) == {dict} and len(set(map(len, mappings))) == 1:
        with suppress(KeyError):  # as many keys, and all of the first sample's: the same ones
            return [list(map(itemgetter(key), mappings)) for key in first]
    keys, kind = first.keys(), type(first)
    for number, mapping in enumerate(mappings):
        is_mapping = type(mapping) is kind or isinstance(mapping, Mapping)
        if not is_mapping or mapping.keys() != keys:
            found = sorted(map(repr, mapping)) if is_mapping else type(mapping).__name__
            raise _MismatchError(f"the keys {sorted(map(repr, first))}", f"{found} in sample {number} of the batch")
    return [[mapping[key] for mapping in mappings] for key in first]


def _collate_arrays(arrays: Sequence[Any], memory: BatchMemory) -> Any:
    first = arrays[0]
    dtype = first.dtype
    if not _have_one_shape(arrays):
        raise _ragged([array.shape for array in arrays])
    mixed = len(set(map(_dtype_of, arrays))) > 1
    if mixed:
        dtype = np.result_type(*arrays)
    if dtype.hasobject:
        return np.stack(arrays)
    batch = memory.empty((len(arrays), *first.shape), dtype)
    _write_rows(batch, arrays, alike=not mixed)
    return batch


def _collate_tensors(tensors: Sequence[Any], memory: BatchMemory, torch: ModuleType) -> Any:
    with torch.no_grad():
        batch = _stacked(tensors, memory, torch)
        if batch is not None:
            return batch
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(set(shapes)) > 1:
            raise _ragged(shapes)
        return torch.stack(list(tensors))


def _collate_numbers(
    numbers: Sequence[Any], kinds: set[type], memory: BatchMemory, torch: ModuleType | None
) -> list[Any] | NDArray[Any] | torch.Tensor:
    values = np.asarray(numbers)
    is_rounded = values.dtype.kind == "f" and all(issubclass(kind, (int, np.integer)) for kind in kinds)
    if values.dtype.hasobject or is_rounded:  # no integer dtype holds all of them
        return list(numbers)
    if torch is not None:
        with suppress(TypeError):  # torch has no such dtype: times stay an array
            tensor = torch.from_numpy(values)
            return memory.empty_tensor(values.shape, tensor.dtype).copy_(tensor)
    batch = memory.empty(values.shape, values.dtype)
    batch[...] = values
    return batch


def _ragged(found: list[Any]) -> _MismatchError:
    odd = next(number for number, shape in enumerate(found) if shape != found[0])
    what = "length" if isinstance(found[0], int) else "shape"
    return _MismatchError(f"{what} {found[0]}", f"{found[odd]} in sample {odd} of the batch")


# torch's --------------------------------------------------------------------------------------------------------------

Leaves = Callable[..., Any]
"""Collates leaves of one type, as torch calls it: `function(batch, collate_fn_map=...)`."""

_memory: ContextVar[BatchMemory | None] = ContextVar("swift_loader_batch_memory", default=None)
"""Where the current thread's tensors go; None: on the heap. Threads that the user starts begin with None."""

_MANY = 32
"""NumPy makes an array of at least so many numbers faster than torch makes a tensor of them."""

_DTYPES = {int: np.dtype(np.int64), float: np.dtype(np.float64), bool: np.dtype(np.bool_)}
"""What torch makes of Python's numbers."""


def torch_collate(samples: Any, memory: BatchMemory | None = None) -> Any:
    """Return what `torch.utils.data.default_collate` returns for these samples, at least one.

    `memory`: where to put the tensors; None: on the heap. Raises what torch raises, with its message.
    """
    torchs = _torchs()
    token = _memory.set(memory)  # a context manager takes 1 us
    try:
        return torchs.collate(samples, collate_fn_map=_replaced(torchs.default_collate_fn_map))
    finally:
        _memory.reset(token)


def use_in_default_collate(registered: Mapping[Any, Leaves] | None = None) -> None:
    """Let `torch.utils.data.default_collate` put tensors where a batch is collated, or else on the heap.

    So the user's own functions can call it: torch's makes a file in shared memory for each tensor of a worker. It
    changes torch's public `default_collate_fn_map` for this process, so call it in a worker only. What the user
    registered there stays. Calling it again does nothing. `registered`: what `registered_functions` returned in the
    trainer.
    """
    functions = _torchs().default_collate_fn_map
    functions.update(registered or {})
    functions.update(_replaced(functions))


def registered_functions() -> dict[Any, Leaves]:
    """Return what the user registered in torch's `default_collate_fn_map`, for workers that don't run the script."""
    functions = _torchs().default_collate_fn_map
    return {kind: function for kind, function in functions.items() if not _is_torchs(kind, function)}


def _is_torchs(kind: Any, function: Leaves) -> bool:
    """Return whether an entry of the map is torch's own, or ours in its place."""
    import torch

    if kind not in {torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_), float, int, str, bytes}:
        return False
    return getattr(getattr(function, "func", function), "__module__", None) in {_torchs().__name__, __name__}


@functools.lru_cache(maxsize=4)
def _are_torchs(functions: tuple[tuple[Any, Leaves], ...]) -> bool:
    return all(_is_torchs(kind, function) for kind, function in functions)


@functools.cache
def _torchs() -> ModuleType:
    from torch.utils.data._utils import collate

    return collate


def _replaced(functions: Mapping[Any, Leaves]) -> dict[Any, Leaves]:
    """Return a map of collate functions with ours instead of torch's, in the same order."""
    ours = _ours()
    return {kind: ours.get(function, function) for kind, function in functions.items()}


@functools.cache
def _ours() -> dict[Leaves, Leaves]:
    """Return our function for each of torch's own. It gets torch's as its first argument."""
    torchs = _torchs()
    return {
        torchs.collate_tensor_fn: functools.partial(_tensors_as_torch, torchs.collate_tensor_fn),
        torchs.collate_numpy_array_fn: functools.partial(_arrays_as_torch, torchs.collate_numpy_array_fn),
        torchs.collate_numpy_scalar_fn: functools.partial(_numbers_as_torch, torchs.collate_numpy_scalar_fn),
        torchs.collate_float_fn: functools.partial(_numbers_as_torch, torchs.collate_float_fn),
        torchs.collate_int_fn: functools.partial(_numbers_as_torch, torchs.collate_int_fn),
    }


def _tensors_as_torch(own: Leaves, batch: Sequence[Any], *, collate_fn_map: Mapping[Any, Leaves] | None = None) -> Any:
    import torch

    collated = _stacked(batch, _memory.get(), torch)
    return own(batch, collate_fn_map=collate_fn_map) if collated is None else collated


def _arrays_as_torch(own: Leaves, batch: Sequence[Any], *, collate_fn_map: Mapping[Any, Leaves] | None = None) -> Any:
    import torch

    tensors = (collate_fn_map or {}).get(torch.Tensor)
    is_tensors_own = getattr(tensors, "func", None) is _tensors_as_torch  # else tensors are the user's to collate
    if is_tensors_own and ARRAY_TYPES.issuperset(map(type, batch)) and _suit_torch(batch) and _is_default_cpu():
        dtype: Any = _torch_dtype(batch[0].dtype)
        collated = (_memory.get() or BatchMemory()).empty_tensor((len(batch), *batch[0].shape), dtype)
        if _write_as_torch(collated.numpy(), batch):
            return collated
    return own(batch, collate_fn_map=collate_fn_map)


def _numbers_as_torch(own: Leaves, batch: Sequence[Any], *, collate_fn_map: Mapping[Any, Leaves] | None = None) -> Any:
    import torch

    kinds, numbers = set(map(type, batch)), None
    dtype = _number_dtype(type(batch[0])) if len(batch) >= _MANY and len(kinds) == 1 and _is_default_cpu() else None
    if dtype is not None:
        with suppress(OverflowError):  # torch says why
            numbers = torch.from_numpy(np.array(batch, dtype))
    if numbers is None:
        numbers = own(batch, collate_fn_map=collate_fn_map)
    return _placed(numbers, _memory.get(), torch)


def _is_default_cpu() -> bool:
    """Return whether torch makes tensors on the CPU by default."""
    import torch

    return torch.empty(0).is_cpu


def _number_dtype(kind: type) -> np.dtype[Any] | None:
    """Return the dtype of the tensor that torch makes of numbers of this type; None: only torch can tell."""
    if not issubclass(kind, np.generic):
        return _DTYPES.get(kind)
    import torch

    return np.dtype(kind) if _keeps_scalars(kind, torch.get_default_dtype()) else None  # type: ignore[arg-type]


@functools.cache
def _keeps_scalars(kind: Any, _default: torch.dtype) -> bool:
    """Return whether torch makes a tensor of NumPy's own dtype of scalars of this type of NumPy's."""
    if not issubclass(kind, (np.bool_, np.number)):
        return False
    largest = np.iinfo(kind).max if np.dtype(kind).kind in "iu" else 1  # torch refuses some of 64 bits
    try:
        like = _torchs().collate_numpy_scalar_fn([kind(largest)])
    except _REFUSALS:
        return False
    return bool(like.is_cpu and like.numpy().dtype == np.dtype(kind))


# torch's, to be sent --------------------------------------------------------------------------------------------------


class _UnusualError(Exception):
    """Samples that `torch_collate` must collate."""


def collate_to_send(samples: Any, memory: SendMemory | None = None) -> Any:
    """Return a batch that arrives as what `torch.utils.data.default_collate` returns for these samples, at least one.

    `memory` None: the batch isn't sent, so it has tensors. Raises what torch raises, with its message.
    """
    if isinstance(samples, Mapping):  # torch would take its keys for samples
        raise _whole(samples)
    # The functions are torch's own, or ours in their place; and tensors are made on the CPU.
    if memory is not None and _is_default_cpu() and _are_torchs(tuple(_torchs().default_collate_fn_map.items())):
        used = memory.used
        try:
            return _to_send(samples, memory)
        except _UnusualError:
            memory.rewind(used)
    return torch_collate(samples, memory)


def _to_send(parts: Any, memory: SendMemory) -> Any:
    """Collate the parts that all samples have at one place."""
    first, kinds = parts[0], set(map(type, parts))
    kind = type(first)
    if len(kinds) != 1:
        raise _UnusualError
    if kind is dict:
        try:
            return {key: _to_send(list(map(itemgetter(key), parts)), memory) for key in first}
        except KeyError:
            raise _UnusualError from None
    if kind is tuple or kind is list:
        if len(set(map(len, parts))) != 1:
            raise _UnusualError
        return [_to_send(column, memory) for column in zip(*parts, strict=True)]
    if kind is str or kind is bytes:
        return parts
    batch: Any = None
    if kind in ARRAY_TYPES:
        if _suit_torch(parts):
            with suppress(*_REFUSALS):  # NumPy allows no more axes
                batch = memory.empty_for_tensor((len(parts), *first.shape), first.dtype)
                batch = batch if _write_as_torch(batch, parts) else None
    elif (dtype := _number_dtype(kind)) is not None:
        batch = memory.empty_for_tensor((len(parts),), dtype)
        try:
            batch[:] = parts
        except OverflowError:
            raise _UnusualError from None
    else:
        import torch

        batch = _stacked(parts, memory, torch) if kind is torch.Tensor else None
    if batch is None:
        raise _UnusualError
    return batch
