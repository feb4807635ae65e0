"""Process-wide settings of torch. Only `set_default_dtype` imports torch; the others use it if it is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
