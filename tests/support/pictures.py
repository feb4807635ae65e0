"""A dataset that draws nothing and needs NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Pictures:
    """Sample i is a picture `(3, side, side) uint8`, which is its own, and the target `i % 5`."""

    def __init__(self, num_samples: int = 20, side: int = 12) -> None:
        self.num_samples, self.side = num_samples, side

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return np.random.default_rng(index).integers(0, 256, (3, self.side, self.side), np.uint8), index % 5
