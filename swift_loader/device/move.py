"""Moves a batch to a device, whatever its structure. Runs in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import ATOMS, map_children
from swift_loader.device.streams import STREAMING
from swift_loader.device.transfer import Transfer

if TYPE_CHECKING:
    import torch

_TENSOR_KINDS = frozenset("biufc")
"""NumPy dtypes that torch may have; text, times and objects stay arrays."""


def to_device(batch: Any, device: torch.device | str | int, dtype: torch.dtype | None = None) -> Any:
    """Return the batch with all tensors and numeric arrays as tensors on `device`. The rest stays the same.

    list, tuple, dict, namedtuple, dataclass and Mapping keep their type, at any depth. An object with a `.to()` method
    moves itself. Doesn't wait for copies from page-locked memory to a CUDA or XPU device.

    Args:
        batch: What to move.
        device: The target.
        dtype: Floating-point tensors are converted to it on the device, as by `Module.to`. Others keep theirs.
    """
    import torch

    target = torch.device(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return _move_tensor(tensor, target, dtype)

    return _convert(batch, move, lambda movable: movable.to(target), "to")


def move_to(batch: Any, transfer: Transfer, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return what `to_device` returns for the batch, in one traversal. Copy tensors that are on the device already."""
    import torch

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = _move_tensor(transfer.own(tensor) if tensor.device.type == device.type else tensor, device, dtype)
        if moved.layout is torch.strided:
            transfer.parts.append(moved)
        else:
            transfer.note(moved, device.type)
        return moved

    def move_object(movable: Any) -> Any:
        transfer.wait_for(movable, device.type)
        moved = movable.to(device)
        transfer.note(moved, device.type)
        return moved

    return _convert(batch, move, move_object, "to")


def _move_tensor(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    # Not to MPS, and not from a GPU to the CPU: nothing tells when such a copy is over.
    moved = tensor.to(device, non_blocking=device.type in STREAMING)
    # In two steps: in one, the conversion would run on the CPU, before the copy.
    return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved


def pin(batch: Any) -> Any:
    """Return the batch with all tensors and numeric arrays as tensors in memory that torch has page-locked.

    Copies them there. Unlike a slot, that memory isn't written again before torch's copies from it to a device are
    over. So the user may drop the batch at any time.
    """
    return _convert(batch, lambda tensor: tensor.pin_memory(), lambda pinnable: pinnable.pin_memory(), "pin_memory")


def as_tensors(batch: Any) -> Any:
    """Return the batch with all numeric arrays as tensors, as `pin` does, but in the same memory."""
    return _convert(batch, lambda tensor: tensor, lambda pinnable: pinnable, "pin_memory")


def owned(batch: Any, transfer: Transfer, device: torch.device) -> Any:
    """Return the batch with copies of the tensors that are on this kind of device already."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return transfer.own(tensor) if tensor.device.type == device.type else tensor

    if not transfer.wait_for(batch, device.type):
        return batch
    return _convert(batch, own, lambda movable: movable, "to", with_arrays=False)


def _convert(
    batch: Any,
    on_tensor: Callable[[torch.Tensor], Any],
    on_object: Callable[[Any], Any],
    method: str,
    *,
    with_arrays: bool = True,
) -> Any:
    """Return the batch with tensors, numeric arrays and objects with this method replaced."""
    import torch

    def convert(part: Any) -> Any:
        kind = type(part)
        if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, part))):
            return part
        if kind is list and ATOMS.issuperset(map(type, part)):
            return part.copy()
        if kind in (np.ndarray, np.memmap):
            return on_tensor(torch.from_numpy(_plain(part))) if with_arrays and _fits_torch(part) else part
        if isinstance(part, torch.Tensor):
            return on_tensor(part)
        if not isinstance(part, type) and callable(getattr(part, method, None)):
            return on_object(part)
        return map_children(part, convert)

    return convert(batch)


def _fits_torch(array: NDArray[Any]) -> bool:
    """Return whether torch has this dtype; it has no long doubles ("g", "G")."""
    return array.dtype.kind in _TENSOR_KINDS and array.dtype.isnative and array.dtype.char not in "gG"


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in a form that torch accepts: no `long long` dtype, writable, plain strides."""
    if array.dtype.kind in "iu":
        array = array.view(np.dtype(f"{array.dtype.kind}{array.dtype.itemsize}"))
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.copy() if odd or not array.flags.writeable else array
