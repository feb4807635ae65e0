"""Sums that tell one batch's bytes from any other's. The expected ones are made of the indices alone, by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_MAX_WEIGHT = 2**31
"""255 of them for each of some 10**6 bytes fit into int64; past that they wrap around, alike everywhere."""


class Dataset(Protocol):
    """Arrays of bytes by index."""

    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...


def make_weights(nbytes: int) -> NDArray[np.int64]:
    """Return a weight for each byte of a batch, `(nbytes,)`: bytes that change places change the sum."""
    return np.random.default_rng(1).integers(1, _MAX_WEIGHT, nbytes, dtype=np.int64)


def expected_checksums(
    dataset: Dataset, num_batches: int, batch_size: int, weights: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the sums of the batches of a dataset that isn't shuffled, `(num_batches,)`."""
    sums = np.empty(num_batches, np.int64)
    for step in range(num_batches):
        batch = np.concatenate([dataset[step * batch_size + place] for place in range(batch_size)])
        sums[step] = np.dot(batch.astype(np.int64), weights)
    return sums


def mismatches(found: Sequence[int] | NDArray[np.int64], expected: NDArray[np.int64]) -> list[int]:
    """Return the positions at which the sums differ.

    Raises:
        ValueError: There are more or fewer sums than were expected.
    """
    sums = np.asarray(found, np.int64)
    if sums.shape != expected.shape:
        raise ValueError(f"{len(sums)} batches came instead of {len(expected)}")
    return [int(step) for step in np.flatnonzero(sums != expected)]
