"""What frameworks take for the sampler of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochSampler:
    """Sets the epoch. Lightning looks for `set_epoch` on a loader's `sampler` only. It has no indices."""

    set_epoch: Callable[[int], None]
    """Takes the epoch of the next iteration."""
