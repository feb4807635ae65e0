"""Finds where a loader's batches go, from the options of `start()`. Imports torch only if it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift_loader.device.move import as_tensors, move_to, owned, pin, to_device
from swift_loader.device.pinning import PageLock, cuda_page_lock
from swift_loader.device.streams import STREAMING, CopyStream, NoStream, copy_stream
from swift_loader.device.transfer import Transfer
from swift_loader.errors import warn

if TYPE_CHECKING:
    import torch

Move = Callable[[Any, Transfer], Any]
"""Moves a host batch, and records its tensors on the device. Runs once per batch."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where batches go, and how."""

    move: Move
    make_stream: Callable[[], CopyStream] = NoStream
    """Returns the stream for the copies."""
    make_page_lock: Callable[[Callable[[str], None]], PageLock] | None = None
    """Makes the page-lock for the source memory; its argument reports failures. None: nothing is page-locked."""


def find_target(
    device: Any, custom: Callable[..., Any] | None, dtype: torch.dtype | None, *, pin_memory: bool
) -> Target | None:
    """Return where batches go. None: they stay the same.

    Raises `TypeError` if `custom` can't be called, or comes without a device, or with a dtype.
    """
    for name, value in (("to_device", custom), ("dtype", dtype)):
        if device is None and value is not None:
            raise TypeError(f"{name} was given without a device; give both, or neither")
    if device is not None:
        target = device_of(device)
        page_lock = functools.partial(cuda_page_lock, target) if target.type == "cuda" else None
        return Target(mover(target, custom, dtype), functools.partial(copy_stream, target), page_lock)
    if not pin_memory:
        return None
    import torch

    if not torch.cuda.is_available():
        warn(
            "pin_memory=True has no effect except that arrays become tensors: torch finds no CUDA device. Leave "
            "pin_memory out"
        )
        return Target(functools.partial(_stay, as_tensors))
    return Target(functools.partial(_stay, pin))


def device_of(device: Any) -> torch.device:
    """Return a device. A CUDA or XPU device without an index gets the current one.

    Raises `ValueError` if torch doesn't know the name, `RuntimeError` if this machine has no such device.
    """
    import torch

    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is unknown to torch ({error}); give for example 'cuda', 'cuda:1' or 'cpu'"
        ) from None
    if found.type not in STREAMING:
        return found
    api = getattr(torch, found.type)
    num_devices = api.device_count()
    if not api.is_available() or (found.index or 0) >= num_devices:
        allowed = f"an index below {num_devices}, or 'cpu'" if num_devices else "'cpu'"
        raise RuntimeError(f"device={device!r}, but torch finds {num_devices} {found.type} devices; give {allowed}")
    return torch.device(found.type, api.current_device()) if found.index is None else found


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.xpu.is_available():
        return torch.device("xpu", torch.xpu.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def mover(device: torch.device, custom: Callable[..., Any] | None, dtype: torch.dtype | None) -> Move:
    """Return the function that moves a batch to a device. It calls `custom(batch, device)` if given.

    Raises `TypeError` if `custom` can't be called, or `dtype` isn't a floating-point dtype or comes with `custom`.
    """
    if custom is not None:
        if not callable(custom):
            raise TypeError(f"to_device is a {type(custom).__name__}, which can't be called; give a function, or None")
        if dtype is not None:
            raise TypeError("to_device and dtype were both given; give one: to_device converts by itself")
        return functools.partial(_call if device.type in STREAMING else _call_there, custom, device)
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r} isn't a floating-point dtype of torch; give one, such as torch.bfloat16")
    if device.type in STREAMING:
        return functools.partial(move_to, device=device, dtype=dtype)
    return functools.partial(_stay, functools.partial(to_device, device=device, dtype=dtype))


def _stay(convert: Callable[[Any], Any], batch: Any, transfer: Transfer) -> Any:  # noqa: ARG001
    """Convert a batch that needs no stream."""
    return convert(batch)


def _call_there(custom: Callable[[Any, Any], Any], device: Any, batch: Any, transfer: Transfer) -> Any:  # noqa: ARG001
    return custom(batch, device)


def _call(custom: Callable[[Any, Any], Any], device: Any, batch: Any, transfer: Transfer) -> Any:
    """Move a batch with the user's function. It may do anything, so its argument and its result are searched."""
    moved = custom(owned(batch, transfer, device), device)
    transfer.note(moved, device.type)
    return moved
