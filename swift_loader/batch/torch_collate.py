"""torch's default collate, written straight into the memory of a batch.

The structure of a batch is torch's: its own `collate` walks the samples. Only the functions that collate leaves are
replaced: tensors, arrays and numbers. Each of ours writes the usual case into the batch's memory, and calls torch's own
function for any other case. So types, dtypes, values and errors are torch's, in the trainer and in a worker. Functions
that the user registered in `default_collate_fn_map` are called as torch calls them.

`torch_collate` is for the loader. After `use_in_default_collate`, calls of `torch.utils.data.default_collate` in the
user's own functions do the same. torch's own function makes a file in shared memory for each tensor of a worker.

Runs in workers and in the trainer. torch is imported by the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from swift_loader.batch.collate import ARRAY_TYPES, BatchMemory, HeapMemory, join_into, write_rows

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

Leaves = Callable[..., Any]
"""Collates leaves of one type, as torch calls it: `function(batch, collate_fn_map=...)`."""

_memory: ContextVar[BatchMemory | None] = ContextVar("swift_loader_batch_memory", default=None)
"""Where the current thread's tensors go; None: on the heap. Threads that the user starts begin with None."""

_SMALL_NBYTES = 1 << 16
"""Batches of tensors up to this size are stacked on the heap and copied: torch finds out itself whether their dtypes
differ. The copy takes 5 us, and asking 256 tensors for their dtype 14 us. For larger batches, the copy costs more."""

REFUSALS = (TypeError, ValueError, RuntimeError, OverflowError)
"""What torch and NumPy raise for leaves that can't be collated. torch's own function then says why."""

_NUMBER_TYPES = (bool, int, float)

_MANY = 32
"""NumPy makes an array of at least so many numbers faster than torch makes a tensor of them."""

_dtype_of, _shape_of, _strides_of = attrgetter("dtype"), attrgetter("shape"), attrgetter("strides")


def torch_collate(samples: Sequence[Any], memory: BatchMemory | None = None) -> Any:
    """Return what `torch.utils.data.default_collate` returns for these samples, at least one.

    `memory`: where to put the tensors; None: on the heap. Raises what torch raises, with its message.
    """
    torchs = _torchs()
    token = _memory.set(memory)  # a context manager takes 1 us
    try:
        return torchs.collate(samples, collate_fn_map=_replaced(torchs.default_collate_fn_map))
    finally:
        _memory.reset(token)


@functools.cache
def _torchs() -> ModuleType:
    from torch.utils.data._utils import collate

    return collate


def are_functions_torchs() -> bool:
    """Return whether `default_collate` uses torch's own functions, or ours in their place, and makes CPU tensors."""
    import torch

    return torch.empty(0).is_cpu and _are_torchs(tuple(_torchs().default_collate_fn_map.items()))


@functools.lru_cache(maxsize=4)
def _are_torchs(functions: tuple[tuple[Any, Leaves], ...]) -> bool:
    modules = {_torchs().__name__, __name__}
    return all(_is_one_of_torchs(kind) and _module_of(function) in modules for kind, function in functions)


def registered_functions() -> dict[Any, Leaves]:
    """Return what the user registered in torch's `default_collate_fn_map`, for workers that don't run the script."""
    from torch.utils.data._utils import collate as torchs

    return {
        kind: function
        for kind, function in torchs.default_collate_fn_map.items()
        if not (_is_one_of_torchs(kind) and _module_of(function) in {torchs.__name__, __name__})
    }


def _is_one_of_torchs(kind: Any) -> bool:
    import torch

    return kind in {torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_), float, int, str, bytes}


def _module_of(function: Leaves) -> str | None:
    return getattr(getattr(function, "func", function), "__module__", None)


def use_in_default_collate(registered: Mapping[Any, Leaves] | None = None) -> None:
    """Let `torch.utils.data.default_collate` put tensors where a batch is collated, or else on the heap.

    It changes torch's public `default_collate_fn_map` for this process, so call it in a worker only. What the user
    registered there stays. Calling it again does nothing. `registered`: what `registered_functions` returned in the
    trainer.
    """
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map.update(registered or {})
    default_collate_fn_map.update(_replaced(default_collate_fn_map))


def _replaced(functions: Mapping[Any, Leaves]) -> dict[Any, Leaves]:
    """Return a map of collate functions with ours instead of torch's, in the same order."""
    ours = _ours()
    return {kind: ours.get(function, function) for kind, function in functions.items()}


@functools.cache
def _ours() -> dict[Leaves, Leaves]:
    """Return our function for each of torch's own. It gets torch's as its first argument."""
    from torch.utils.data._utils import collate as torchs

    return {
        torchs.collate_tensor_fn: functools.partial(_collate_tensors, torchs.collate_tensor_fn),
        torchs.collate_numpy_array_fn: functools.partial(_collate_arrays, torchs.collate_numpy_array_fn),
        torchs.collate_numpy_scalar_fn: functools.partial(_collate_numbers, torchs.collate_numpy_scalar_fn),
        torchs.collate_float_fn: functools.partial(_collate_numbers, torchs.collate_float_fn),
        torchs.collate_int_fn: functools.partial(_collate_numbers, torchs.collate_int_fn),
    }


def _collate_tensors(own: Leaves, batch: Sequence[Any], *, collate_fn_map: Mapping[Any, Leaves] | None = None) -> Any:
    import torch

    first, collated = batch[0], None
    if first.layout is torch.strided and first.is_cpu and not first.is_quantized:
        try:
            collated = _stacked(batch, _memory.get(), torch)
        except REFUSALS:
            collated = None
    return own(batch, collate_fn_map=collate_fn_map) if collated is None else collated


def _stacked(tensors: Sequence[Any], memory: BatchMemory | None, torch: ModuleType) -> torch.Tensor | None:
    """Return dense tensors of one dtype as a batch; None: there are several dtypes, or they require grad."""
    first = tensors[0]
    if memory is not None and first.nbytes * len(tensors) > _SMALL_NBYTES and _are_of(torch.Tensor, tensors):
        batch = memory.empty_tensor((len(tensors), *first.shape), first.dtype)
        torch.stack(tensors, 0, out=batch)
        return batch
    batch = torch.stack(tensors, 0)
    return None if batch.dtype is not first.dtype or batch.requires_grad else _placed(batch, memory, torch)


def stack_tensors(tensors: Sequence[Any], memory: BatchMemory) -> torch.Tensor | None:
    """Return plain dense tensors as a batch in `memory`; None: they aren't, or only torch can stack them."""
    import torch

    first = tensors[0]
    if type(first) is not torch.Tensor or first.layout is not torch.strided or not first.is_cpu or first.is_quantized:
        return None
    try:
        return _stacked(tensors, memory, torch)
    except REFUSALS:
        return None


def _are_of(kind: type[torch.Tensor], tensors: Sequence[Any]) -> bool:
    """Return whether the tensors have one dtype, and exactly this type."""
    return set(map(type, tensors)) == {kind} and len({tensor.dtype for tensor in tensors}) == 1


def _placed(tensor: torch.Tensor, memory: BatchMemory | None, torch: ModuleType) -> torch.Tensor:
    """Return a copy of a dense tensor in `memory`; for None or a subclass, the tensor itself."""
    if memory is None or type(tensor) is not torch.Tensor or not tensor.is_cpu:
        return tensor
    return memory.empty_tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _collate_arrays(own: Leaves, batch: Sequence[Any], *, collate_fn_map: Mapping[Any, Leaves] | None = None) -> Any:
    import torch

    tensors = (collate_fn_map or {}).get(torch.Tensor)
    is_tensors_own = getattr(tensors, "func", None) is _collate_tensors  # else tensors are the user's to collate
    dtype = _torch_dtype(batch[0].dtype) if is_tensors_own and _are_alike(batch) else None
    if dtype is not None and torch.empty(0).is_cpu:  # the default device
        collated = (_memory.get() or HeapMemory()).empty_tensor((len(batch), *batch[0].shape), dtype)
        if write_arrays(collated.numpy(), batch):
            return collated
    return own(batch, collate_fn_map=collate_fn_map)


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's dtype for NumPy's; None if there is none."""
    import torch

    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except REFUSALS:
        return None


def _are_alike(arrays: Sequence[Any]) -> bool:
    """Return whether arrays have one dtype and shape."""
    return (
        ARRAY_TYPES.issuperset(map(type, arrays))
        and len(set(map(_dtype_of, arrays))) == 1
        and len(set(map(_shape_of, arrays))) == 1
    )


def has_torch_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether torch has a dtype for NumPy's."""
    return _torch_dtype(dtype) is not None


def write_arrays(rows: NDArray[Any], arrays: Sequence[Any]) -> bool:
    """Write arrays of one dtype and shape into a batch; return False if torch refuses their strides."""
    # Contiguous arrays have the strides that torch accepts, but those of axes with one element may be anything.
    if min(arrays[0].shape, default=0) > 1 and join_into(rows, arrays):
        return True
    size = arrays[0].itemsize
    if any(step < 0 or step % size for strides in set(map(_strides_of, arrays)) for step in strides):
        return False
    write_rows(rows, arrays, alike=True)
    return True


def _collate_numbers(own: Leaves, batch: Sequence[Any], *, collate_fn_map: Mapping[Any, Leaves] | None = None) -> Any:
    import torch

    numbers = _as_tensor(own, batch, torch)
    if numbers is None:
        numbers = own(batch, collate_fn_map=collate_fn_map)
    return _placed(numbers, _memory.get(), torch)


def _as_tensor(own: Leaves, numbers: Sequence[Any], torch: ModuleType) -> torch.Tensor | None:
    """Return many numbers of one type as a tensor on the heap; None: torch may do it faster, or must do it."""
    kind = type(numbers[0])
    is_usual = kind in _NUMBER_TYPES or issubclass(kind, np.generic)
    if len(numbers) < _MANY or not is_usual or set(map(type, numbers)) != {kind}:
        return None
    like = _probe(own, numbers[:1])
    try:
        return None if like is None else torch.from_numpy(np.array(numbers, like.numpy().dtype))
    except OverflowError:
        return None


def keeps_scalars(kind: Any) -> bool:
    """Return whether torch makes a tensor of NumPy's own dtype of scalars of this type of NumPy's."""
    import torch

    return _keeps_scalars(kind, torch.get_default_dtype())


@functools.cache
def _keeps_scalars(kind: Any, _default: torch.dtype) -> bool:
    own = _torchs().collate_numpy_scalar_fn
    largest = np.iinfo(kind).max if np.dtype(kind).kind in "iu" else 1  # torch refuses some of 64 bits
    like = _probe(own, [kind(largest)]) if issubclass(kind, (np.bool_, np.number)) else None
    return like is not None and like.numpy().dtype == np.dtype(kind)


def _probe(convert: Callable[[Any], torch.Tensor], leaf: Any) -> torch.Tensor | None:
    """Return what torch makes of a leaf; None: it refuses, or puts it on another device by default."""
    try:
        tensor = convert(leaf)
    except REFUSALS:
        return None
    return tensor if tensor.is_cpu else None
