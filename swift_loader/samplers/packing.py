"""Packing: sequences of different lengths in one batch without padding.

`best_fit` chooses which samples form a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

MAX_TOTAL = 2.0**61
"""Lengths are rounded up and added as 64-bit integers."""


def checked_lengths(lengths: Sequence[int] | Indices) -> Indices:
    """Return the lengths as a new array, `(n,) int64`."""
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths has {array.ndim} dimensions; it must have one, with the length of each sample")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"lengths are {array.dtype}; they must be integers, one for each sample")
    if array.size and array.min() < 0:
        index = int(np.argmax(array < 0))
        raise ValueError(f"lengths[{index}]={array[index]} is negative; a length must be at least 0")
    if array.sum(dtype=np.float64) >= MAX_TOTAL:
        raise ValueError(f"the sum of lengths is {array.sum(dtype=np.float64):g}; it must be below 2**61")
    return array.astype(np.int64)


def best_fit(costs: Indices, max_tokens: int, max_samples: int, num_buckets: int) -> tuple[Indices, Indices]:
    """Fill batches from each of `num_buckets` buckets of neighbours; return `(n,)` places and where batches end.

    A batch begins with the longest sample left, goes on in the given order, and is filled up with the longest that
    fits. The first keeps long samples from being left over, the second mixes lengths as the order does. Batches are as
    full as with first-fit decreasing, where those of a batch have one length. Takes 1 us per sample.
    """
    places: list[Indices] = []
    stops: list[int] = []
    bounds = np.arange(num_buckets + 1) * len(costs) // num_buckets
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        by_length = np.argsort(costs[begin:end], kind="stable")
        taken, ends = _fill(costs[begin:end][by_length].tolist(), by_length, max_tokens, max_samples)
        places.append(begin + by_length[taken])
        stops += [begin + stop for stop in ends]
    return np.concatenate(places), np.array(stops, np.int64)


def _fill(costs: list[int], by_length: Indices, max_tokens: int, max_samples: int) -> tuple[Indices, list[int]]:
    """Return the samples of a bucket batch after batch, and where batches end. `costs`: ascending."""
    num_samples, queued = len(costs), 0
    queue = np.empty(num_samples, np.int64)
    queue[by_length] = np.arange(1, num_samples + 1)
    order = queue.tolist()
    # Node n is sample n - 1, and 0 means none. A node points to itself, or if it is taken to one below it: union-find.
    below = list(range(num_samples + 1))
    taken: list[int] = []
    stops: list[int] = []
    while len(taken) < num_samples:
        node, room, most = _longest(below, num_samples), max_tokens, len(taken) + max_samples
        while node:
            below[node] = node - 1
            taken.append(node - 1)
            room -= costs[node - 1]
            if len(taken) >= most:
                break
            while queued < num_samples and below[order[queued]] != order[queued]:
                queued += 1
            is_next = queued < num_samples and costs[order[queued] - 1] <= room
            node = order[queued] if is_next else _longest(below, bisect_right(costs, room))
        stops.append(len(taken))
    return np.array(taken, np.int64), stops


def _longest(below: list[int], node: int) -> int:
    """Return the highest node up to this one that isn't taken, and shorten the way to it."""
    while below[node] != node:
        below[node] = node = below[below[node]]
    return node
