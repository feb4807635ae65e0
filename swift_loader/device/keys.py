"""Keys for random numbers on the device, derived from the batch alone. Runs in the loop's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[Callable[[], int] | None] = ContextVar("swift_loader_batch_key", default=None)


def batch_key() -> int:
    """Return the key of the batch that is being moved, a 64-bit integer. For use in `to_device`.

    The key depends on (seed, epoch, position, rank). It differs for each batch, rank and epoch, and is the same after a
    resume. Seed a generator with it: `torch.Generator(device).manual_seed(batch_key())`. Outside of a move, each call
    returns a new random number, so a function can be tried alone.
    """
    make = _current.get()
    return int.from_bytes(os.urandom(8), "little") if make is None else make()


@contextmanager
def keyed_by(make: Callable[[], int]) -> Iterator[None]:
    """Return a context in which `batch_key` returns `make()`, in this thread."""
    token = _current.set(make)
    try:
        yield
    finally:
        _current.reset(token)
