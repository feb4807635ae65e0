"""A batch sampler that puts samples of similar lengths together, so that batches need little padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from swift_loader.checks import check_choice, check_flag, check_integer
from swift_loader.samplers.buckets import FixedSize, Grouping, Indices
from swift_loader.samplers.grouped import GroupedEpochs, checked_lengths
from swift_loader.samplers.ranks import ranks_of, refuse_sampler, seed_of
from swift_loader.samplers.shards import Shard
from swift_loader.sampling.plan import Uneven

__all__ = ["LengthBucketBatchSampler"]

BATCHES_PER_BUCKET = 100
"""With 32 log-normal lengths up to 2,000 in a batch, this leaves 4 % padding."""


class LengthBucketBatchSampler(DistributedSampler[list[int]]):
    """Yields batches of `batch_size` samples of similar lengths: the argument `batch_sampler` of a DataLoader.

    Each epoch shuffles the samples, cuts them into buckets, sorts each bucket by length, cuts it into batches and
    shuffles these. Every sample is in one batch. The order depends on lengths, options, seed and epoch only.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Indices,
        batch_size: int,
        *,
        bucket_size: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        uneven: str | Uneven = Uneven.PAD,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Begin with epoch 0. With several ranks and no seed, it blocks until all ranks are here.

        Args:
            lengths: `(n,)` length of each sample: a list, an array or a tensor of integers. It is copied.
            batch_size: Samples in a batch of one rank.
            bucket_size: Samples that are sorted together, rounded up to whole batches. None: 100 batches. More means
                less padding and less mixing.
            shuffle: Whether to shuffle. If not, buckets follow the order of the dataset.
            seed: Seed of the order. None: that of torch's default generator, rank 0's if there are several ranks.
            drop_last: Whether to leave out the last batch of an epoch, if it has less samples.
            uneven: The last step, if there aren't batches for all ranks: "pad" repeats its batches, "drop" leaves them
                out, "exact" gives none to some ranks.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: This rank. Needs `num_replicas`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, or the ranks have no common seed.
        """
        refuse_sampler("lengths", lengths)
        costs = checked_lengths(lengths)
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.drop_last = check_flag("drop_last", drop_last)
        size = min(self.batch_size, len(costs) + 1)  # a larger one has the same effect, and may not fit into 64 bits
        wanted = BATCHES_PER_BUCKET * size
        if bucket_size is not None:
            wanted = check_integer("bucket_size", bucket_size, 1)
        bucket_size = -(-min(wanted, max(len(costs), 1)) // size) * size
        shuffle = check_flag("shuffle", shuffle)
        chosen_uneven, ranks = check_choice("uneven", uneven, Uneven), ranks_of(num_replicas, rank)
        rule = FixedSize(size, self.drop_last, bucket_size)
        self.num_replicas, self.rank = ranks.world_size, ranks.rank
        self._epochs = GroupedEpochs(
            type(self).__name__,
            Grouping(costs, np.arange(len(costs), dtype=np.int64), rule, shuffle),
            Shard(ranks.rank, ranks.world_size, chosen_uneven),
            seed_of(seed, ranks, is_used=shuffle),
            has_own_seed=seed is not None,
            facts={"batch_size": self.batch_size, "bucket_size": bucket_size, "drop_last": int(self.drop_last)},
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next pass, or the rest of a saved one. It begins with the first `next`."""
        return iter(self._epochs)

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return self._epochs.num_batches

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self._epochs.passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def sampler(self) -> LengthBucketBatchSampler:
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
