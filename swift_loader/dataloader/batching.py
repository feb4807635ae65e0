"""What a position in batches depends on: how samples become batches, and which samplers choose them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from swift_loader.dataloader.state import LoaderPosition
from swift_loader.errors import StateMismatch

NAME = "batching"
"""Of the field in a state."""

_TORCHS = RandomSampler.__module__
"""Other classes may stand for each other: frameworks replace samplers."""


def batching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what the loader's batches depend on, as plain types."""
    facts: dict[str, Any] = {"batch_size": loader.batch_size}
    sampler = loader.sampler
    is_torchs = isinstance(sampler, (RandomSampler, SequentialSampler)) and type(sampler).__module__ == _TORCHS
    if is_torchs and not isinstance(loader.dataset, IterableDataset):
        facts |= {"sampler": type(sampler).__name__, "num_samples": len(sampler)}  # type: ignore[arg-type]
    return facts


def check_batching(saved: Mapping[str, Any] | None, position: LoaderPosition, loader: DataLoader[Any]) -> None:
    """Check that a position in the middle of an epoch means the same in this loader.

    `saved`: what `batching_of` gave when the state was saved; None: it isn't known. Raises `StateMismatch` if the
    position counts other batches.
    """
    if saved is None or position.draws.is_over or not position.num_yielded:
        return
    here = batching_of(loader)
    has_states = all(one.has_state for one in position.workers)
    counts_batches = not position.is_stream or position.num_sharing or not has_states
    names = [name for name in ("batch_size", "sampler", "num_samples") if name in saved and name in here]
    for name in names:
        if saved[name] != here[name] and (counts_batches or name != "batch_size"):
            raise StateMismatch(
                f"the state was saved with {name}={saved[name]!r} in the middle of an epoch, but this loader has "
                f"{name}={here[name]!r}. The state counts batches, which are others here. Give the former one, or "
                f"change it where an epoch is over. A ShuffleBatchSampler can continue with another batch size"
            )
