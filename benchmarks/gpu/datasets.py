"""Datasets for what comes after the loader. NumPy only, so that a worker that has one never imports torch."""

from __future__ import annotations

import numpy as np
from common.datasets import Images
from numpy.typing import NDArray

_NUM_CLASSES = 1000
_HEADER_NBYTES = 8


class LabelledImages(Images):
    """Images of (3, 224, 224) uint8 with a label each."""

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:  # type: ignore[override]
        return super().__getitem__(index), index % _NUM_CLASSES


class Blocks:
    """Arrays of bytes that look random; what is in one follows from its index alone, and no two are the same."""

    def __init__(self, length: int, nbytes: int) -> None:
        self._noise = np.random.default_rng(0).integers(0, 256, 2 * nbytes, dtype=np.uint8)
        self._length = length
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Return `(nbytes,) uint8`: another cut of the same noise, shifted in value, too, behind the index itself."""
        start = index * 7919 % self._nbytes
        block = self._noise[start : start + self._nbytes] + np.uint8(index % 251)
        block[:_HEADER_NBYTES] = np.frombuffer(index.to_bytes(_HEADER_NBYTES, "little"), np.uint8)
        return block
