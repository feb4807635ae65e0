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


class Counting:
    """Shuffles by its epoch, or by torch's default generator. Its state doesn't tell the place in the epoch."""

    def __init__(self, kind: str, batch_size: int | None, size: int = 30) -> None:
        self.kind, self.batch_size, self.size, self.epoch_number, self.place = kind, batch_size, size, 0, 0

    def __len__(self) -> int:
        return self.size // (self.batch_size or 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch_number = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": [self.epoch_number, 7], "start": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch_number, self.place = state["epoch"][0], state["start"]

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch_number
        if self.kind == "counts at once":  # as lerobot's EpisodeAwareSampler
            self.epoch_number += 1
        return self.items(epoch)

    def items(self, epoch: int) -> Iterator[Any]:
        if self.kind == "counts at the first item":
            self.epoch_number += 1
        generator = None if self.kind == "global generator" else torch.Generator().manual_seed(epoch)
        order, size = torch.randperm(self.size, generator=generator).tolist(), self.batch_size or 1
        for start in range(self.place, self.size, size):
            if self.kind == "tells blocks":
                self.place = (start + size) // 12 * 12
            yield order[start : start + size] if self.batch_size else order[start]
        self.place = 0
        if self.kind in ("counts at the end", "tells blocks"):
            self.epoch_number += 1


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
    "own state, no place": lambda n, r: distributed(Counting("counts at once", None), n, r, seed=3),
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
