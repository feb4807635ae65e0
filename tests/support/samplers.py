"""Samplers to test, and what ranks draw from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, WeightedRandomSampler

from swift_loader import (
    LengthBucketBatchSampler,
    ShuffleBatchSampler,
    ShuffleSampler,
    StratifiedBatchSampler,
    TokenBudgetBatchSampler,
    WeightedBatchSampler,
    distributed,
)

NUM_SAMPLES = 103
LENGTHS = np.random.default_rng(1).integers(1, 50, NUM_SAMPLES)

Make = Callable[[int, int], Any]
"""Returns the sampler of one rank, given the number of ranks and the rank."""


class GlobalRandom(Sampler[int]):
    """Draws from a global generator of NumPy whenever it yields. Has no length."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield int(np.random.randint(NUM_SAMPLES))


MAKERS: dict[str, Make] = {
    "shuffle batches": lambda n, r: ShuffleBatchSampler(NUM_SAMPLES, 4, seed=3, num_replicas=n, rank=r),
    "in order": lambda n, r: ShuffleBatchSampler(NUM_SAMPLES, 4, shuffle=False, num_replicas=n, rank=r),
    "shuffle": lambda n, r: ShuffleSampler(NUM_SAMPLES, 1, seed=3, num_replicas=n, rank=r),
    "buckets": lambda n, r: LengthBucketBatchSampler(LENGTHS, 4, bucket_size=20, seed=3, num_replicas=n, rank=r),
    "tokens": lambda n, r: TokenBudgetBatchSampler(LENGTHS, 150, bucket_size=20, seed=3, num_replicas=n, rank=r),
    "tokens, dropped": lambda n, r: TokenBudgetBatchSampler(
        LENGTHS, 60, padded=False, uneven="drop", seed=3, num_replicas=n, rank=r
    ),
    "draws": lambda n, r: WeightedBatchSampler(LENGTHS, 4, seed=3, num_replicas=n, rank=r),
    "tokens, packed": lambda n, r: TokenBudgetBatchSampler(
        LENGTHS, 60, padded=False, fit="best", balance=4, bucket_size=20, seed=3, num_replicas=n, rank=r
    ),
    "strata": lambda n, r: StratifiedBatchSampler(LENGTHS % 7, 4, seed=3, num_replicas=n, rank=r),
    "weighted": lambda n, r: distributed(WeightedRandomSampler([1.0] * 20, NUM_SAMPLES), n, r, seed=3),
    "weighted, own generator": lambda n, r: distributed(
        WeightedRandomSampler([1.0] * 20, NUM_SAMPLES, generator=torch.Generator()), n, r, seed=3, drop_last=True
    ),
    "random batches": lambda n, r: distributed(
        BatchSampler(RandomSampler(range(NUM_SAMPLES)), 4, drop_last=False), n, r, seed=3
    ),
    "global generator": lambda n, r: distributed(GlobalRandom(), n, r, seed=3),
    "own state": lambda n, r: distributed(ShuffleSampler(NUM_SAMPLES, 1, seed=9, num_replicas=1, rank=0), n, r, seed=3),
    "own state, batches": lambda n, r: distributed(
        TokenBudgetBatchSampler(LENGTHS, 50, seed=9, num_replicas=1, rank=0), n, r, seed=3, drop_last=True
    ),
}


def of_ranks(make: Make, world_size: int, epoch: int = 0) -> list[list[Any]]:
    """Return what each rank draws in an epoch."""
    drawn = []
    for rank in range(world_size):
        sampler = make(world_size, rank)
        sampler.set_epoch(epoch)
        drawn.append(list(sampler))
    return drawn


def flat(items: list[Any]) -> list[int]:
    """Return the indices of batches, or indices as they are."""
    return [index for item in items for index in (item if isinstance(item, list) else [item])]
