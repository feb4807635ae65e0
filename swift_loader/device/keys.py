"""What random numbers that are drawn on the device depend on: the batch alone. Runs in the loop's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["batch_key", "keyed_by"]

_current: ContextVar[Callable[[], int] | None] = ContextVar("swift_loader_batch_key", default=None)


def batch_key() -> int:
    """Return the key of the batch that is being moved, a 64-bit integer; for use in `to_device`.

    It depends on (seed, epoch, position, rank): the same after a resume, another one for each batch, rank and epoch.
    `torch.Generator(device).manual_seed(batch_key())` draws what only the batch decides. Outside of a move it is a new
    random number each time, so that a function can be tried out by itself.
    """
    make = _current.get()
    return int.from_bytes(os.urandom(8), "little") if make is None else make()


@contextmanager
def keyed_by(make: Callable[[], int]) -> Iterator[None]:
    """Have `batch_key` return what `make` does, in this thread, within the context."""
    token = _current.set(make)
    try:
        yield
    finally:
        _current.reset(token)
