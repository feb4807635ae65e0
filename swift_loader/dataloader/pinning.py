"""Says where `pin_memory` pins, as torch does."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader


def pin_device_of(loader: DataLoader[Any]) -> str | None:
    """Return the kind of device for whose copies batches are page-locked; None: they aren't."""
    if not loader.pin_memory:
        return None
    if loader.pin_memory_device:
        warnings.warn(
            f"pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device={loader.pin_memory_device!r}.",
            stacklevel=4,
        )
    device = _accelerator()
    if device is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory "
            "won't be used.",
            stacklevel=4,
        )
    if device == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=4,
        )
        return None
    return device


def _accelerator() -> str | None:
    """Return the kind of the current accelerator; None if there is none."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return "cuda" if torch.cuda.is_available() else None
    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    return None if current is None else current.type
