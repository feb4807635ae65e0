"""The loads: batches of some size whose samples cost little, or some CPU time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH_SIZE = 16
_NUM_BATCHES = 1000
_NUM_DISTINCT = 32
"""Samples that differ. They take 20 MB for batches of 10 MB, more than a core's cache."""


class Blocks:
    """Arrays of `nbytes` bytes, each in memory of its own, which take some CPU time to get."""

    def __init__(self, length: int, nbytes: int, cpu_s: float = 0.0) -> None:
        generator = np.random.default_rng(0)
        self._blocks = [generator.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(_NUM_DISTINCT)]
        self._length = length
        self._cpu_s = cpu_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        if self._cpu_s:
            end_s = time.thread_time() + self._cpu_s
            while time.thread_time() < end_s:
                pass
        return self._blocks[index % len(self._blocks)]


@dataclass(frozen=True, slots=True)
class Case:
    """A dataset, in batches of `BATCH_SIZE`."""

    name: str
    nbytes: int
    """Bytes of a batch."""
    cpu_s: float = 0.0
    """CPU time that the samples of a batch take, besides collating them."""

    @property
    def dataset_kwargs(self) -> dict[str, Any]:
        """All arguments of `Blocks`."""
        sample_s = self.cpu_s / BATCH_SIZE
        return {"length": BATCH_SIZE * _NUM_BATCHES, "nbytes": self.nbytes // BATCH_SIZE, "cpu_s": sample_s}


CASES = (
    Case("200 kB", 200_000),
    Case("1 MB", 1_000_000),
    Case("3 MB", 3_000_000),
    Case("10 MB", 10_000_000),
    Case("1 MB, 20 ms", 1_000_000, 0.020),
)
