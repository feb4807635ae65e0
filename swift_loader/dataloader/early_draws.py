"""Says how many batches may be drawn from a sampler earlier than torch draws them.

torch draws `prefetch_factor` batches per worker when an epoch begins, and one more with each batch that the loop gets.
A program notices draws that come earlier if the sampler draws from a generator that the loop uses, too, or if it looks
at what the loop changes. torch's samplers draw all their numbers for the first index, so nobody notices.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_DRAW_AT_ONCE = frozenset({SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler, range})
"""Exact types: a class derived from one may do anything."""

_OURS = "swift_loader.samplers."
"""Where our samplers are defined. They leave all generators as they were."""


def num_early_draws(loader: DataLoader[Any]) -> float:
    """Return how many batches of an epoch nobody notices the draws of; infinite for all."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) in _DRAW_AT_ONCE or type(sampler).__module__.startswith(_OURS):
        return math.inf
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples <= len(sampler.data_source):
        # At its end it draws once more, which shows if the generator is the user's.
        return math.inf if sampler.generator is None else len(loader) - 1
    return 0
