"""Which devices there are, and torch's streams for them.

A device is only asked about if the user names it, or asks for the default: the first question to CUDA opens its driver,
which a fork of the trainer can't use any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_WITHOUT_STREAMS = ("cpu", "meta", "mps")
"""Kinds of devices to which copies are over when they return, or whose streams torch doesn't show."""


@cache
def streams_of(kind: str) -> Any:
    """Return what has `Stream`, `Event`, `stream` and `current_stream` for a kind of device; None: it has no streams.

    That is its own module of torch, as for CUDA, XPU and NPU, or else torch's generic classes.
    """
    import torch

    if kind in _WITHOUT_STREAMS:
        return None
    module = getattr(torch, kind, None)
    if all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return module
    if kind != accelerator() or not hasattr(torch.Stream, "__enter__"):  # before torch 2.8
        return None
    return _GenericStreams(kind)


class _GenericStreams:
    """torch's streams for the current accelerator."""

    def __init__(self, kind: str) -> None:
        import torch

        self._torch = torch
        self.Stream, self.Event = torch.Stream, partial(torch.Event, kind)

    def current_stream(self, device: torch.device) -> Any:
        """Return this thread's current stream of the device."""
        return self._torch.accelerator.current_stream(device.index)  # far faster than with the device

    def stream(self, stream: Any) -> Any:
        """Return a context in which this stream is the current one."""
        return stream


def accelerator() -> str | None:
    """Return the kind of the current accelerator; None if there is none."""
    import torch

    if hasattr(torch, "accelerator"):
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return None if current is None else current.type
    modules = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}  # before torch 2.6
    return next((kind for kind, module in modules.items() if module.is_available()), None)


def pinning_accelerator() -> str | None:
    """Return the kind of accelerator that reads page-locked memory; None if there is none."""
    return None if (kind := accelerator()) == "mps" else kind


def device_of(device: Any) -> torch.device:
    """Return a device. An accelerator without an index gets the current one.

    Raises `ValueError` if torch doesn't know the name, `RuntimeError` if this machine has no such device.
    """
    import torch

    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is unknown to torch ({error}); give for example 'cuda', 'cuda:1' or 'cpu'"
        ) from None
    if streams_of(found.type) is None:
        return found
    module = getattr(torch, found.type)
    num_devices = module.device_count()
    if not module.is_available() or (found.index or 0) >= num_devices:
        allowed = f"an index below {num_devices}, or 'cpu'" if num_devices else "'cpu'"
        raise RuntimeError(f"device={device!r}, but torch finds {num_devices} {found.type} devices; give {allowed}")
    return torch.device(found.type, module.current_device()) if found.index is None else found


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is none."""
    return device_of(accelerator() or "cpu")


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Return a context in which an accelerator is the current one of its kind, in this thread."""
    import torch

    module = getattr(torch, device.type)
    if hasattr(module, "device"):
        with module.device(device.index):
            yield
        return
    before = module.current_device()
    module.set_device(device.index)
    try:
        yield
    finally:
        module.set_device(before)
