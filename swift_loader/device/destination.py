"""Where a loader's batches go, as the user said in `start()`. Imports torch only if that needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift_loader.device.move import as_tensors, pin, to_device
from swift_loader.device.pinning import PageLock, cuda_page_lock
from swift_loader.device.streams import STREAMING, CopyStream, NoStream, copy_stream
from swift_loader.notices import warn

if TYPE_CHECKING:
    import torch

__all__ = ["Destination", "default_device", "device_of", "find_destination", "mover"]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where batches go, and how."""

    move: Callable[[Any], Any]
    """Takes a batch on the host; runs once per batch."""
    make_stream: Callable[[], CopyStream] = NoStream
    """Returns what the copies run on."""
    make_page_lock: Callable[[Callable[[str], None]], PageLock] | None = None
    """Returns what page-locks the memory that is copied from, given whom to tell if it can't; None: nothing does."""


def find_destination(
    device: Any, custom: Callable[..., Any] | None, dtype: torch.dtype | None, *, pin_memory: bool
) -> Destination | None:
    """Return where batches go; None if they stay as they are.

    Raises:
        TypeError: `custom` can't be called, or comes without a device, or with a dtype.
    """
    for name, value in (("to_device", custom), ("dtype", dtype)):
        if device is None and value is not None:
            raise TypeError(f"{name} was given without a device; give both, or neither")
    if device is not None:
        return _on_device(device_of(device), custom, dtype)
    if not pin_memory:
        return None
    import torch

    if not torch.cuda.is_available():
        warn(
            "pin_memory=True makes tensors of arrays, but page-locks nothing: there is no CUDA device that could read "
            "page-locked memory"
        )
        return Destination(as_tensors)
    return Destination(pin)


def _on_device(device: torch.device, custom: Callable[..., Any] | None, dtype: torch.dtype | None) -> Destination:
    move = mover(device, custom, dtype)
    page_lock = functools.partial(cuda_page_lock, device) if device.type == "cuda" else None
    return Destination(move, functools.partial(copy_stream, device), page_lock)


def device_of(device: Any) -> torch.device:
    """Return a device, with the number that it has now, where there may be several.

    Raises:
        ValueError: Nothing is called like that.
        RuntimeError: There is no such device here.
    """
    import torch

    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is unknown to torch ({error}); give 'cuda', 'cuda:1', 'cpu', say"
        ) from None
    if found.type not in STREAMING:
        return found
    api = getattr(torch, found.type)
    if not api.is_available() or (found.index or 0) >= api.device_count():
        raise RuntimeError(
            f"device={device!r}, but torch finds {api.device_count()} {found.type} devices here; give one of these, "
            f"or 'cpu'"
        )
    return torch.device(found.type, api.current_device()) if found.index is None else found


def default_device() -> torch.device:
    """Return the current accelerator; without one, the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.xpu.is_available():
        return torch.device("xpu", torch.xpu.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def mover(device: torch.device, custom: Callable[..., Any] | None, dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """Return what moves a batch to a device, by `custom(batch, device)` if given.

    Raises:
        TypeError: `custom` can't be called; `dtype` isn't a floating-point dtype, or comes with `custom`.
    """
    if custom is not None:
        if not callable(custom):
            raise TypeError(f"to_device is a {type(custom).__name__}, which can't be called; give a function, or None")
        if dtype is not None:
            raise TypeError("to_device and dtype were both given; give one: to_device converts by itself")
        return functools.partial(_call, custom, device)
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r} is no floating-point dtype of torch, as torch.bfloat16 is")
    return functools.partial(to_device, device=device, dtype=dtype)


def _call(move: Callable[[Any, Any], Any], device: Any, batch: Any) -> Any:
    return move(batch, device)
