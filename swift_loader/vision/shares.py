"""Which samples of an epoch a rank gets, each once or several times. Pure arithmetic, O(1) memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.permutation import derive_key
from swift_loader.sampling.shuffle import Order, OrderSettings

__all__ = ["SELECTED_ROUND", "Share"]

SELECTED_ROUND = 256
"""Of a larger dataset, repeated augmentation visits a multiple of this many samples, as timm's `RepeatAugSampler` does.
The number is that of the reference implementation of DeiT (Touvron et al., 2021)."""

_CYCLE = 0xC7C1E
"""Tells the keys of the orders of further cycles from other keys of the same seed."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's samples of each epoch.

    All samples are put in the epoch's order, each `num_repeats` times in a row. Rank r of R gets the items r, r + R,
    r + 2R and so on, so the repeats of a sample go to different ranks. With repeats, a rank stops after `1 / R` of the
    number of samples: an epoch isn't longer than without them.
    """

    order: OrderSettings
    num_samples: int
    """Length of the dataset."""
    num_repeats: float
    """How often each sample comes, at least 1. A fraction lets some samples come once more than others."""
    world_size: int
    rank: int

    @property
    def num_items(self) -> int:
        """Number of items of this rank in an epoch; the same on all ranks."""
        if self.num_repeats == 1 or self.num_samples < SELECTED_ROUND:
            return -(-self.num_samples // self.world_size)
        return self.num_samples // SELECTED_ROUND * SELECTED_ROUND // self.world_size

    def indices(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset indices of this rank's items with these numbers, `(n,) -> (n,)`.

        Numbers from `num_items` on are those of further cycles through the dataset, each in an order of its own.
        """
        if not len(numbers):
            return numbers
        cycles, numbers = np.divmod(numbers, self.num_items)
        indices = np.empty_like(numbers)
        for cycle in np.unique(cycles).tolist():
            chosen = cycles == cycle
            indices[chosen] = self._order(cycle).indices(epoch, self._positions(numbers[chosen]))
        return indices

    def _positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in the order the items are. After the last repeat, the first one comes again."""
        items = self.rank + self.world_size * numbers
        items %= math.ceil(self.num_samples * self.num_repeats)
        if float(self.num_repeats).is_integer():
            return items // int(self.num_repeats)
        return np.floor_divide(items, self.num_repeats).astype(np.int64)

    def _order(self, cycle: int) -> Order:
        seed = self.order.seed if cycle == 0 else derive_key(self.order.seed, _CYCLE, cycle)
        return Order(self.num_samples, replace(self.order, seed=seed))
