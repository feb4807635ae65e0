"""Settings of torch that hold for a whole process. torch is touched only where it is imported already."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["limited_threads", "set_default_dtype", "set_num_threads"]


def set_default_dtype(name: str) -> None:
    """Make this dtype torch's default; empty: leave it."""
    if name:
        import torch

        torch.set_default_dtype(getattr(torch, name))


def set_num_threads(number: int) -> None:
    """Have torch compute with so many threads."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != number:
        torch.set_num_threads(number)


@contextmanager
def limited_threads(number: int) -> Iterator[None]:
    """Have torch compute with so many threads for a while: sums and convolutions depend on it in the last bit."""
    torch: Any = sys.modules.get("torch")
    before = number if torch is None else torch.get_num_threads()
    try:
        set_num_threads(number)
        yield
    finally:
        if before != number:
            torch.set_num_threads(before)
