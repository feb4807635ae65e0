"""A batch sampler that fills batches up to a number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from swift_loader.checks import check_choice, check_flag, check_integer
from swift_loader.notices import warn
from swift_loader.samplers.buckets import Grouping, Indices, TokenBudget
from swift_loader.samplers.grouped import GroupedEpochs, checked_lengths
from swift_loader.samplers.ranks import ranks_of, refuse_sampler, seed_of
from swift_loader.samplers.shards import Shard
from swift_loader.sampling.plan import Uneven

__all__ = ["Oversized", "TokenBudgetBatchSampler"]

BUCKET_SIZE = 10_000
"""Samples that are sorted together. With log-normal lengths up to 2,000 and 16,384 tokens, 1.5 % is padding."""

MAX_TOKENS = 2**62
"""Larger budgets have the same effect, and sums must fit into 64 bits."""


class Oversized(str, Enum):
    """What becomes of a sample that is longer than the budget."""

    RAISE = "raise"
    """It is a `ValueError`."""
    DROP = "drop"
    """It is left out of every epoch, and a warning says how many are."""
    ALONE = "alone"
    """It is a batch of its own, which exceeds the budget."""


class TokenBudgetBatchSampler(DistributedSampler[list[int]]):
    """Yields batches of at most `max_tokens` tokens: the argument `batch_sampler` of a DataLoader.

    Each epoch shuffles the samples, cuts them into buckets, sorts each bucket by length, fills batches from it and
    shuffles these. Every sample is in one batch. The order depends on lengths, options, seed and epoch only.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Indices,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        padded: bool = True,
        pad_to_multiple_of: int = 1,
        oversized: str | Oversized = Oversized.RAISE,
        bucket_size: int = BUCKET_SIZE,
        shuffle: bool = True,
        seed: int | None = None,
        uneven: str | Uneven = Uneven.PAD,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Begin with epoch 0. With several ranks and no seed, it blocks until all ranks are here.

        Args:
            lengths: `(n,)` length of each sample in tokens: a list, an array or a tensor of integers. It is copied.
            max_tokens: Budget of a batch of one rank.
            max_samples: Maximum of samples in a batch. None: no maximum.
            padded: Whether all samples of a batch are padded to its longest one. Then a batch costs its longest sample
                times its samples. Otherwise it costs the sum of its lengths, and buckets aren't sorted.
            pad_to_multiple_of: Lengths count rounded up to a multiple of this. An empty sample counts as one token.
            oversized: What becomes of a sample that is longer than `max_tokens`: "raise", "drop" or "alone".
            bucket_size: Samples that are sorted together. More means less padding and less mixing.
            shuffle: Whether to shuffle. If not, buckets follow the order of the dataset.
            seed: Seed of the order. None: that of torch's default generator, rank 0's if there are several ranks.
            uneven: The last step, if there aren't batches for all ranks: "pad" repeats its batches, "drop" leaves them
                out, "exact" gives none to some ranks.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: This rank. Needs `num_replicas`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, a sample is too long, or the ranks have no common seed.
        """
        refuse_sampler("lengths", lengths)
        self.max_tokens = check_integer("max_tokens", max_tokens, 1)
        most = 0 if max_samples is None else check_integer("max_samples", max_samples, 1)
        multiple = check_integer("pad_to_multiple_of", pad_to_multiple_of, 1, 1 << 20)
        padded, shuffle = check_flag("padded", padded), check_flag("shuffle", shuffle)
        bucket_size = check_integer("bucket_size", bucket_size, 1)
        chosen_uneven, ranks = check_choice("uneven", uneven, Uneven), ranks_of(num_replicas, rank)
        costs = -(-np.maximum(checked_lengths(lengths), 1) // multiple) * multiple
        members = _members(costs, self.max_tokens, check_choice("oversized", oversized, Oversized))
        costs = costs[members]
        num_samples = max(len(costs), 1)
        sorted_together = min(bucket_size, num_samples) if padded else 0
        rule = TokenBudget(min(self.max_tokens, MAX_TOKENS), min(most or num_samples, num_samples), sorted_together)
        self.num_replicas, self.rank = ranks.world_size, ranks.rank
        self._epochs = GroupedEpochs(
            type(self).__name__,
            Grouping(costs, members, rule, shuffle),
            Shard(ranks.rank, ranks.world_size, chosen_uneven),
            seed_of(seed, ranks, is_used=shuffle),
            has_own_seed=seed is not None,
            facts={
                "max_tokens": self.max_tokens,
                "max_samples": most,
                "padded": int(padded),
                "bucket_size": bucket_size,
            },
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next pass, or the rest of a saved one. It begins with the first `next`."""
        return iter(self._epochs)

    def __len__(self) -> int:
        """Return the number of batches of this rank in the whole epoch `epoch`. It may differ from epoch to epoch."""
        return self._epochs.num_batches

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self._epochs.passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def sampler(self) -> TokenBudgetBatchSampler:
        """Itself: frameworks call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A pass that runs stays as it is."""
        self._epochs.passes.choose(check_integer("epoch", epoch, 0))

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the batches drawn so far: integers and strings, the same on every rank."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there. The number of ranks may be another one than when it was saved.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: The state is of other lengths, options or seed. Nothing has changed then.
        """
        self._epochs.load_state_dict(state)


def _members(costs: Indices, max_tokens: int, oversized: Oversized) -> Indices:
    """Return the samples that take part.

    Raises:
        ValueError: A sample is too long.
    """
    fits = costs <= min(max_tokens, MAX_TOKENS)
    num_left_out = int(np.count_nonzero(~fits))
    if not num_left_out or oversized is Oversized.ALONE:
        return np.arange(len(costs), dtype=np.int64)
    if oversized is Oversized.RAISE:
        index = int(np.argmin(fits))
        raise ValueError(
            f"sample {index} counts as {costs[index]} tokens, more than max_tokens={max_tokens}, and so do "
            f"{num_left_out - 1} others. Raise max_tokens, or give oversized='drop' or oversized='alone'"
        )
    warn(f"{num_left_out} of {len(costs)} samples have more than max_tokens={max_tokens} tokens and are left out")
    return np.flatnonzero(fits).astype(np.int64)
