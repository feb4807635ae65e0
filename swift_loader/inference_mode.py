"""Keeps the loop's `torch.inference_mode()` away from batches: a batch may be used after that mode, in training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
