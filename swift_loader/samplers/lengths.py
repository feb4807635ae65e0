"""Batch samplers that put samples of similar lengths together, so that batches need little padding.

    epoch ──► permutation ──► buckets of neighbours, sorted by length ──► batches ──► batches in permuted order

Every sample is in one batch. All steps are vectorised, except for one list look-up per batch. They are seeded, and the
same in every process.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from swift_loader.checks import check_choice, check_flag, check_integer
from swift_loader.errors import warn
from swift_loader.ranks.ranks import Ranks
from swift_loader.samplers.base import ResumableSampler, ranks_of, refuse_sampler
from swift_loader.sampling.permutation import derive_key
from swift_loader.sampling.plan import Uneven
from swift_loader.sampling.run import Pass, Shard
from swift_loader.sampling.shuffle import Order, OrderSettings

Indices = NDArray[np.int64]

_BATCH_ORDER = 0xBA7C4
"""Tells the key of the batches' order from that of the samples' order."""

MAX_TOTAL = 2.0**61
"""Lengths are rounded up and added as 64-bit integers."""

BATCHES_PER_BUCKET = 100
"""With 32 log-normal lengths up to 2,000 in a batch, this leaves 4 % padding."""

BUCKET_SIZE = 10_000
"""Samples that are sorted together. With log-normal lengths up to 2,000 and 16,384 tokens, 1.5 % is padding."""

MAX_TOKENS = 2**62
"""Larger budgets have the same effect, and sums must fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of an epoch, over all ranks."""

    indices: Indices
    """`(n,)` dataset indices, batch after batch."""
    starts: Indices
    """`(num_batches,)` where each batch begins in `indices`."""
    stops: Indices
    """`(num_batches,)` where each batch ends."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> list[int]:
        batch: list[int] = self.indices[self.starts[number] : self.stops[number]].tolist()
        return batch


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Batches of one size. Only the last one of the epoch may have less."""

    batch_size: int
    drop_last: bool
    bucket_size: int
    """Samples that are sorted together: whole batches, so that no batch is cut in two."""

    def cut(self, lengths: Indices) -> Indices:
        """Return where batches end, `(num_batches,)`."""
        num_samples = len(lengths)
        ends = np.arange(self.batch_size, num_samples + self.batch_size, self.batch_size, dtype=np.int64)
        return ends[: num_samples // self.batch_size] if self.drop_last else np.minimum(ends, num_samples)

    def num_unmoved(self, num_samples: int) -> int:
        """Return how many batches at the end stay there: one if it has less samples than the others."""
        return int(num_samples % self.batch_size > 0 and not self.drop_last)


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Batches of as many samples as fit into a budget. A sample beyond the budget is a batch of its own."""

    max_tokens: int
    max_samples: int
    bucket_size: int
    """Samples that are sorted together; then a batch costs its longest sample times its samples. 0: none are sorted,
    and a batch costs the sum of its lengths."""

    def cut(self, lengths: Indices) -> Indices:
        """Return where batches end, `(num_batches,)`. Takes the lengths in order, descending in each bucket."""
        num_samples = len(lengths)
        firsts = np.arange(num_samples, dtype=np.int64)
        if self.bucket_size:
            ends = firsts + np.minimum(self.max_tokens // lengths, self.max_samples)
            np.minimum(ends, (firsts // self.bucket_size + 1) * self.bucket_size, out=ends)
        else:
            sums = np.cumsum(lengths)
            ends = np.searchsorted(sums, sums - lengths + self.max_tokens, side="right")
            np.minimum(ends, firsts + self.max_samples, out=ends)
        np.maximum(ends, firsts + 1, out=ends)
        followers, reached, chain = np.minimum(ends, num_samples).tolist(), 0, []
        while reached < num_samples:
            reached = followers[reached]
            chain.append(reached)
        return np.array(chain, np.int64)

    def num_unmoved(self, num_samples: int) -> int:  # noqa: ARG002 - the other rule needs it
        """Return how many batches at the end stay there."""
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """How the samples of an epoch become batches."""

    lengths: Indices
    """`(n,)` what each sample costs, at least 1."""
    members: Indices
    """`(n,)` the dataset index of each of them."""
    rule: FixedSize | TokenBudget
    shuffle: bool

    def batches(self, seed: int, epoch: int) -> Batches:
        """Return the batches of an epoch. Takes 0.5 s for 10**6 samples."""
        num_samples = len(self.lengths)
        positions = np.arange(num_samples, dtype=np.int64)
        order = Order(num_samples, OrderSettings(seed, self.shuffle, 0, 1)).indices(epoch, positions)
        if self.rule.bucket_size:
            order = self._sorted(order, positions // self.rule.bucket_size)
        ends = self.rule.cut(self.lengths[order])
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
        if self.shuffle:
            turn = self._turn(seed, epoch, len(ends))
            starts, ends = starts[turn], ends[turn]
        return Batches(self.members[order], starts, ends)

    def _sorted(self, order: Indices, buckets: Indices) -> Indices:
        """Sort each bucket by length, the longest first. Equal lengths stay in their order."""
        lengths = self.lengths[order]
        longest, num_buckets = int(lengths.max(initial=0)), int(buckets.max(initial=0)) + 1
        if (longest + 1) * num_buckets < 1 << 62:  # one key is three times as fast as two
            return order[np.argsort(buckets * (longest + 1) - lengths, kind="stable")]
        return order[np.lexsort((-lengths, buckets))]

    def _turn(self, seed: int, epoch: int, num_batches: int) -> Indices:
        """Return the order of the batches."""
        num_moved = num_batches - self.rule.num_unmoved(len(self.lengths))
        settings = OrderSettings(derive_key(seed, _BATCH_ORDER), shuffle=True, window=0, run_length=1)
        moved = Order(num_moved, settings).indices(epoch, np.arange(num_moved, dtype=np.int64))
        return np.concatenate([moved, np.arange(num_moved, num_batches, dtype=np.int64)])


def _checked_lengths(lengths: Sequence[int] | Indices) -> Indices:
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


class _GroupedSampler(ResumableSampler[list[int]]):
    """Yields the batches of one rank. Memory is O(samples)."""

    def __init__(
        self, ranks: Ranks, uneven: str | Uneven, seed: int | None, grouping: Grouping, facts: Mapping[str, int]
    ) -> None:
        self._shard = Shard(ranks.rank, ranks.world_size, check_choice("uneven", uneven, Uneven))
        super().__init__(ranks, seed, is_seed_used=grouping.shuffle)
        self._grouping = grouping
        checksum = zlib.crc32(grouping.lengths.tobytes())
        self._facts = {**facts, "shuffle": int(grouping.shuffle), "checksum of lengths": checksum}
        self._made: tuple[int, int, Batches] | None = None
        """Seed and epoch of the batches that were made last, and these."""

    def _rest(self, this: Pass) -> Iterator[list[int]]:
        shard, batches = self._shard, self._batches(this.epoch)
        position, num_batches = this.position, len(batches)
        while (picked := shard.pick(num_batches - position)) is not None:
            number, is_last = position + picked, shard.is_last(num_batches - position)
            position = num_batches if is_last else min(num_batches, position + shard.world_size)
            this.advance(position, at_end=is_last)
            yield batches[number]
        this.advance(num_batches, at_end=True)  # the last ones of an uneven epoch aren't drawn

    def __len__(self) -> int:
        """Return the number of batches of this rank in the whole epoch `epoch`. It may differ from epoch to epoch."""
        return self._shard.num_steps(len(self._batches(self.epoch)))

    def _batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch over all ranks. Those made last are kept."""
        if self._made is None or self._made[:2] != (self._seed, epoch):
            self._made = None  # free its memory first
            self._made = (self._seed, epoch, self._grouping.batches(self._seed, epoch))
        return self._made[2]


class LengthBucketBatchSampler(_GroupedSampler):
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
        costs = _checked_lengths(lengths)
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.drop_last = check_flag("drop_last", drop_last)
        size = min(self.batch_size, len(costs) + 1)  # a larger one has the same effect, and may not fit into 64 bits
        wanted = BATCHES_PER_BUCKET * size
        if bucket_size is not None:
            wanted = check_integer("bucket_size", bucket_size, 1)
        bucket_size = -(-min(wanted, max(len(costs), 1)) // size) * size
        super().__init__(
            ranks_of(num_replicas, rank),
            uneven,
            seed,
            Grouping(
                costs,
                np.arange(len(costs), dtype=np.int64),
                FixedSize(size, self.drop_last, bucket_size),
                check_flag("shuffle", shuffle),
            ),
            {"batch_size": self.batch_size, "bucket_size": bucket_size, "drop_last": int(self.drop_last)},
        )


class Oversized(str, Enum):
    """What becomes of a sample that is longer than the budget."""

    RAISE = "raise"
    """It is a `ValueError`."""
    DROP = "drop"
    """It is left out of every epoch, and a warning says how many are."""
    ALONE = "alone"
    """It is a batch of its own, which exceeds the budget."""


class TokenBudgetBatchSampler(_GroupedSampler):
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
        costs = -(-np.maximum(_checked_lengths(lengths), 1) // multiple) * multiple
        members = _members(costs, self.max_tokens, check_choice("oversized", oversized, Oversized))
        costs = costs[members]
        num_samples = max(len(costs), 1)
        sorted_together = min(bucket_size, num_samples) if padded else 0
        rule = TokenBudget(min(self.max_tokens, MAX_TOKENS), min(most or num_samples, num_samples), sorted_together)
        super().__init__(
            ranks_of(num_replicas, rank),
            uneven,
            seed,
            Grouping(costs, members, rule, shuffle),
            {
                "max_tokens": self.max_tokens,
                "max_samples": most,
                "padded": int(padded),
                "bucket_size": bucket_size,
            },
        )


def _members(costs: Indices, max_tokens: int, oversized: Oversized) -> Indices:
    """Return the samples that take part."""
    fits = costs <= min(max_tokens, MAX_TOKENS)
    num_left_out = int(np.count_nonzero(~fits))
    if not num_left_out or oversized is Oversized.ALONE:
        return np.arange(len(costs), dtype=np.int64)
    if oversized is Oversized.RAISE:
        index = int(np.argmin(fits))
        others = f", and so do {num_left_out - 1} others" if num_left_out > 1 else ""
        raise ValueError(
            f"sample {index} counts as {costs[index]} tokens, more than max_tokens={max_tokens}{others}. Raise "
            f"max_tokens, or give oversized='drop' or oversized='alone'"
        )
    warn(f"{num_left_out} of {len(costs)} samples have more than max_tokens={max_tokens} tokens and are left out")
    return np.flatnonzero(fits).astype(np.int64)
