"""Process-wide settings of torch. Only `set_default_dtype` imports torch; the others use it if it is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Keeps the loop's `torch.inference_mode()` away from batches: a batch may be used after that mode, in training.


def is_inference_mode() -> bool:
    """Return whether this thread is in `torch.inference_mode()`. Doesn't import torch."""
    is_enabled = getattr(sys.modules.get("torch"), "is_inference_mode_enabled", None)
    return is_enabled is not None and is_enabled()


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that autograd accepts, also inside `torch.inference_mode()`. The grad mode stays the same."""
    if not is_inference_mode():
        yield
        return
    torch: Any = sys.modules["torch"]
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def set_default_dtype(name: str) -> None:
    """Set torch's default dtype, and import torch for it; do nothing if `name` is empty."""
    if name:
        import torch

        torch.set_default_dtype(getattr(torch, name))


def set_num_threads(number: int) -> None:
    """Set the number of threads that torch uses, if torch is imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != number:
        torch.set_num_threads(number)


@contextmanager
def limited_threads(number: int) -> Iterator[None]:
    """Set the number of torch's threads temporarily: the last bit of sums and convolutions depends on it."""
    torch: Any = sys.modules.get("torch")
    before = number if torch is None else torch.get_num_threads()
    try:
        set_num_threads(number)
        yield
    finally:
        if before != number:
            torch.set_num_threads(before)
