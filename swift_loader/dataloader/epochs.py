"""The epochs that `set_epoch` sets on samplers and datasets.

A shuffled order depends on them. After a restart, Fabric and Accelerate count epochs from 0 again, and a Lightning
Trainer calls `set_epoch` after `iter`, so a state keeps the epochs of what it describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_INNER = ("sampler", "batch_sampler")
"""Under these names, samplers refer to those that they draw from: torch's, Lightning's, Accelerate's, timm's."""


def with_inner(*samplers: Any) -> Iterator[Any]:
    """Yield samplers, and those that they draw from."""
    left, seen = [one for one in reversed(samplers) if one is not None], set()
    while left:
        sampler = left.pop()
        if id(sampler) not in seen:
            seen.add(id(sampler))
            yield sampler
            inner = (getattr(sampler, name, None) for name in _INNER)
            left += [one for one in inner if one is not None]


def epoch_of(thing: Any) -> int | None:
    """Return the epoch of a sampler or dataset. None if `set_epoch` doesn't set one."""
    epoch = getattr(thing, "epoch", None) if hasattr(thing, "set_epoch") else None
    return epoch if isinstance(epoch, int) else None


def epochs_of(things: Sequence[Any]) -> list[int]:
    """Return the epochs of those that have one."""
    return [epoch for epoch in map(epoch_of, things) if epoch is not None]


@contextmanager
def at_epochs(things: Sequence[Any], epochs: list[int] | None) -> Iterator[None]:
    """Set those that have an epoch to these, and afterwards to what they had before. None: leave them."""
    having = [one for one in things if epoch_of(one) is not None]
    before = epochs_of(having)
    if epochs is None or len(epochs) != len(before) or epochs == before:
        yield
        return
    try:
        _set_epochs(having, epochs)
        yield
    finally:
        _set_epochs(having, before)


def _set_epochs(things: Sequence[Any], epochs: list[int]) -> None:
    for thing, epoch in zip(things, epochs, strict=True):
        thing.set_epoch(epoch)
