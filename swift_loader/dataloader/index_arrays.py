"""Draws the indices of torch's own samplers as arrays: in a list, each index would be an object.

The generators are used as by torch's samplers: the same draws, in the same order, each as late. A subclass of them is
the user's sampler, and is iterated over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import RandomSampler, SequentialSampler

from swift_loader.transport.task import IndexArray

_RUN = 1 << 16
"""How many consecutive indices are made at a time."""


def batched_arrays(sampler: Any, batch_size: int, *, drop_last: bool) -> Iterator[IndexArray] | None:
    """Return the batches that torch's `BatchSampler` makes of this sampler's indices.

    Nothing is drawn before the first batch is asked for.

    Returns:
        The batches; None if it isn't a sampler of torch's that is known here.
    """
    if type(sampler) is SequentialSampler:
        runs = _consecutive(sampler)
    elif type(sampler) is RandomSampler and not sampler.replacement:
        runs = _permuted(sampler)
    else:
        return None
    return _cut(runs, batch_size, drop_last=drop_last)


def _consecutive(sampler: SequentialSampler) -> Iterator[NDArray[np.int64]]:
    """Yield all indices in order, a run at a time."""
    length = len(sampler.data_source)
    for start in range(0, length, _RUN):
        yield np.arange(start, min(start + _RUN, length), dtype=np.int64)


def _permuted(sampler: RandomSampler) -> Iterator[NDArray[np.int64]]:
    """Yield permutations, each drawn when its first index is asked for; the last one even if it is cut to nothing."""
    length, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    num_whole, num_left = divmod(sampler.num_samples, length)
    for number in range(num_whole + 1):
        permutation = torch.randperm(length, generator=generator).numpy(force=True)
        yield permutation if number < num_whole else permutation[:num_left]


def _cut(runs: Iterator[NDArray[np.int64]], batch_size: int, *, drop_last: bool) -> Iterator[IndexArray]:
    """Yield batches of indices. A run is asked for when an index of it is needed."""
    left = np.empty(0, np.int64)
    for run in runs:
        indices = np.concatenate((left, run)) if len(left) else run
        num_whole = len(indices) // batch_size * batch_size
        for start in range(0, num_whole, batch_size):
            yield IndexArray(indices[start : start + batch_size])
        left = indices[num_whole:]
    if len(left) and not drop_last:
        yield IndexArray(left)
