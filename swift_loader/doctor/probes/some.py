"""Some samples of a dataset, for a short run of a loader. Workers import this module, so it imports little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift_loader.cli import made_by

__all__ = ["Some", "without_loader"]


class Some:
    """Some samples of the dataset that a target names."""

    def __init__(self, target: str, indices: Sequence[int]) -> None:
        """Build the dataset. Runs in the loader's own processes."""
        self._dataset = without_loader(made_by(target))
        self._indices = list(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._indices[index]]


def without_loader(thing: Any) -> Any:
    """Return the dataset of a loader, and anything else as it is."""
    is_loader = hasattr(thing, "dataset") and not hasattr(type(thing), "__getitem__")
    return thing.dataset if is_loader else thing
