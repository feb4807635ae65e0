"""Moves a batch to a device, whatever its structure. Runs in the trainer."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.collate import refill_mapping

if TYPE_CHECKING:
    import torch

__all__ = ["mover", "to_device"]

_TENSOR_KINDS = frozenset("biufc")
"""NumPy dtypes that torch may have; text, times and objects stay arrays."""


def mover(device: Any, custom: Callable[..., Any] | None) -> Callable[[Any], Any] | None:
    """Return what moves a batch to `device`, by `custom(batch, device)` if given; None if batches stay.

    Raises:
        TypeError: `custom` can't be called, or comes without a device.
    """
    if custom is not None and not callable(custom):
        raise TypeError(f"to_device is a {type(custom).__name__}, which can't be called; give a function, or None")
    if device is None:
        if custom is not None:
            raise TypeError("to_device was given without a device; give both, or neither")
        return None
    import torch

    return functools.partial(_apply, custom or to_device, torch.device(device))


def _apply(move: Callable[[Any, Any], Any], device: Any, batch: Any) -> Any:
    return move(batch, device)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all tensors and numeric arrays as tensors on `device`, everything else as it was.

    list, tuple, dict, namedtuple, dataclass and Mapping keep their type, at any depth; an object with a `.to()` method
    is asked to move itself.
    """
    import torch

    if type(batch) in (np.ndarray, np.memmap):
        if batch.dtype.kind not in _TENSOR_KINDS or not batch.dtype.isnative or batch.dtype.char in "gG":
            return batch  # "gG": long doubles
        return torch.from_numpy(_plain(batch)).to(device, non_blocking=True)
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, type):
        return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return refill_mapping(batch, {key: to_device(part, device) for key, part in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(part, device) for part in batch)
    if dataclasses.is_dataclass(batch):
        result = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(result, field.name, to_device(getattr(batch, field.name), device))
        return result
    return batch


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in a form that torch takes: C's `long long` by its other name, writable, of plain strides."""
    if array.dtype.kind in "iu":
        array = array.view(np.dtype(f"{array.dtype.kind}{array.dtype.itemsize}"))
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.copy() if odd or not array.flags.writeable else array
