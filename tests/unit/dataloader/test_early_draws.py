from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from swift_loader import DataLoader, ShuffleSampler, distributed
from swift_loader.dataloader.early_draws import num_early_draws

DATASET: Any = list(range(10))


class Derived(SequentialSampler):
    """May do anything."""


def num_early(**options: Any) -> float:
    return num_early_draws(DataLoader(DATASET, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"batch_size": None, "shuffle": True},
        {"sampler": range(5)},
        {"sampler": SubsetRandomSampler([1, 2], torch.Generator())},
        {"sampler": WeightedRandomSampler([1, 2], 5)},
        {"batch_sampler": BatchSampler(BatchSampler(RandomSampler(DATASET), 2, False), 2, False)},  # type: ignore[arg-type]
        {"sampler": ShuffleSampler(10, 2, num_replicas=1, rank=0)},
        {"sampler": distributed(Derived(DATASET), 1, 0)},
    ],
)
def test_samplers_that_draw_once_may_be_drawn_early(options: dict[str, Any]) -> None:
    assert num_early(**options) == math.inf


def test_the_last_batch_shows_in_a_generator_of_the_users() -> None:
    assert num_early(shuffle=True, generator=torch.Generator(), batch_size=3) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": DATASET},
        {"sampler": Derived(DATASET)},
        {"sampler": RandomSampler(DATASET, replacement=True)},
        {"sampler": RandomSampler(DATASET, num_samples=11)},
        {"batch_sampler": BatchSampler(Derived(DATASET), 2, False)},
        {"batch_sampler": [[1], [2]]},
    ],
)
def test_other_samplers_are_drawn_when_torch_draws_them(options: dict[str, Any]) -> None:
    assert num_early(**options) == 0
