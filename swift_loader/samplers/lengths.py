"""Batch samplers that put samples of similar lengths together, so that batches need little padding.

    epoch ──► permutation ──► buckets of neighbours, sorted by length ──► batches ──► batches in permuted order

Every sample is in one batch. All steps are vectorised, except for one list look-up per batch, and one per sample with
`fit="best"`. They are seeded, and the same in every process.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Literal

import numpy as np

from swift_loader.checks import check_choice, check_flag, check_integer
from swift_loader.errors import warn
from swift_loader.ranks.ranks import Ranks
from swift_loader.samplers.base import ResumableSampler, ranks_of, refuse_sampler
from swift_loader.samplers.packing import Indices, best_fit, checked_lengths
from swift_loader.sampling.permutation import derive_key
from swift_loader.sampling.run import Pass
from swift_loader.sampling.shuffle import Order, OrderSettings

_BATCH_ORDER, _BLOCK_ORDER = 0xBA7C4, 0xB10C5
"""Tell the keys of the order of batches and of blocks from that of the samples' order."""

BATCHES_PER_BUCKET = 100
"""With 32 log-normal lengths up to 2,000 in a batch, this leaves 4 % padding."""

BUCKET_SIZE = 10_000
"""Samples that are sorted together. With log-normal lengths up to 2,000 and 16,384 tokens, 1.5 % is padding."""

MAX_TOKENS = 2**62
"""Larger budgets have the same effect, and sums must fit into 64 bits."""


class _GroupedSampler(ResumableSampler[list[int]]):
    """Yields the batches of one rank. Memory is O(samples). A subclass cuts an epoch's samples into batches."""

    _num_unmoved = 0
    """How many batches at the end of an epoch stay there."""
    _balance = 1
    """How many batches, neighbours in cost, stay together."""
    _padded = True
    """Whether a batch costs its longest sample times its samples. Otherwise it costs their sum."""
    _num_samples: int
    """Length of the dataset."""
    _begun: tuple[int, int] | None = None
    """Epoch and position at which the last pass began, unless `loss_scales` has taken them."""

    def __init__(
        self,
        ranks: Ranks,
        uneven: str,
        seed: int | None,
        shuffle: bool,
        costs: Indices,
        members: Indices,
        bucket_size: int,
        facts: Mapping[str, int],
    ) -> None:
        """`costs`: `(n,)` what each sample counts, at least 1. `members`: the dataset index of each.

        `bucket_size`: samples that are sorted together. 0: none are.
        """
        super().__init__(ranks, seed, uneven, is_seed_used=check_flag("shuffle", shuffle))
        self._shuffle, self._costs, self._members, self._bucket_size = shuffle, costs, members, bucket_size
        self._facts = {**facts, "shuffle": int(shuffle), "checksum of lengths": zlib.crc32(costs.tobytes())}
        self._made: tuple[int, int, tuple[Indices, Indices, Indices]] | None = None
        """Seed and epoch of the batches that were made last, and these."""

    def _rest(self, this: Pass) -> Iterator[list[int]]:
        shard, (indices, starts, stops) = self._shard, self._batches(this.epoch)
        position, num_batches = this.position, len(starts)
        self._begun = this.epoch, position
        while (picked := shard.pick(num_batches - position)) is not None:
            number, is_last = position + picked, shard.is_last(num_batches - position)
            position = num_batches if is_last else min(num_batches, position + shard.world_size)
            this.advance(position, at_end=is_last)
            batch: list[int] = indices[starts[number] : stops[number]].tolist()
            yield batch
        this.advance(num_batches, at_end=True)  # the last ones of an uneven epoch aren't drawn

    def __len__(self) -> int:
        """Return the number of batches of this rank in the whole epoch `epoch`. It may differ from epoch to epoch."""
        return self._shard.num_steps(len(self._batches(self.epoch)[1]))

    def loss_scales(self, tokens: Sequence[int] | Indices) -> Iterator[float]:
        """Yield what to multiply the mean loss of each batch by, for the pass that began last.

        The batches of a step have different numbers of tokens. DDP and FSDP average over ranks, which counts the tokens
        of a small batch more. With these scales, the average is that over all tokens of the step:

            scale = tokens of this rank's batch * number of ranks / tokens of the batches of all ranks in this step

            for batch, scale in zip(loader, sampler.loss_scales(lengths)):
                loss = cross_entropy(model(batch), batch["labels"]) * scale

        Take the first scale after the first batch, as `zip` does here. Then it is right in a resumed pass, too.

        Args:
            tokens: `(n,)` how many tokens of each sample of the dataset the loss counts. With `mask_first` of
                `PackCollate`, these are `np.maximum(lengths - 1, 0)`.

        Raises:
            TypeError: They aren't integers.
            ValueError: There is not one for each sample, or one is negative.
            RuntimeError: No pass has begun, or its scales were taken before. All errors come with the first scale.
        """
        counts = checked_lengths(tokens, "tokens")
        if len(counts) != self._num_samples:
            raise ValueError(f"tokens has {len(counts)} samples, but the dataset has {self._num_samples}")
        if self._begun is None:
            raise RuntimeError("no pass has begun since the last scale; take the first batch before the first scale")
        (epoch, position), self._begun = self._begun, None
        indices, starts, stops = self._batches(epoch)
        sums = _sums(counts[indices], starts, stops)[position:]
        shard, world_size = self._shard, self.num_replicas
        num_full, num_left = divmod(len(sums), world_size)
        steps = sums[: len(sums) - num_left].reshape(num_full, world_size)
        picks = [replace(shard, rank=rank).pick(num_left) for rank in range(world_size)]
        if picks[shard.rank] is not None:
            last = [0 if pick is None else sums[pick - num_left] for pick in picks]
            steps = np.concatenate([steps, np.array([last], np.int64)])
        yield from (steps[:, shard.rank] * world_size / np.maximum(steps.sum(axis=1), 1)).tolist()

    def _batches(self, epoch: int) -> tuple[Indices, Indices, Indices]:
        """Return the batches of an epoch over all ranks: `(n,)` dataset indices, and where each batch begins and ends.

        Takes 0.5 s for 10**6 samples. Those made last are kept.
        """
        self._agree()
        if self._made is not None and self._made[:2] == (self._seed, epoch):
            return self._made[2]
        self._made = None  # free its memory first
        num_samples = len(self._costs)
        positions = np.arange(num_samples, dtype=np.int64)
        order = Order(num_samples, OrderSettings(self._seed, self._shuffle, 0, 1)).indices(epoch, positions)
        order, stops = self._cut(order)
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])[: len(stops)]
        if self._shuffle:
            turn = self._turn(epoch, len(stops) - self._num_unmoved, _BATCH_ORDER)
            starts[: len(turn)], stops[: len(turn)] = starts[turn], stops[turn]
        if len(stops) >= self._balance > 1:  # blocks of neighbours in cost, in permuted order; then what is left
            costs = self._costs[order]
            costs = costs[starts] * (stops - starts) if self._padded else _sums(costs, starts, stops)
            blocks = np.argsort(-costs, kind="stable")
            whole = blocks[: len(blocks) // self._balance * self._balance].reshape(-1, self._balance)
            blocks[: whole.size] = whole[self._turn(epoch, len(whole), _BLOCK_ORDER)].reshape(-1)
            starts, stops = starts[blocks], stops[blocks]
        made = self._members[order], starts, stops
        self._made = (self._seed, epoch, made)
        return made

    def _cut(self, order: Indices) -> tuple[Indices, Indices]:
        """Return the samples batch after batch, and where batches end, `(num_batches,)`."""
        raise NotImplementedError

    def _sorted(self, order: Indices) -> Indices:
        """Sort each bucket by length, the longest first. Equal lengths stay in their order."""
        costs, buckets = self._costs[order], np.arange(len(order), dtype=np.int64) // self._bucket_size
        longest, num_buckets = int(costs.max(initial=0)), int(buckets.max(initial=0)) + 1
        if (longest + 1) * num_buckets < 1 << 62:  # one key is three times as fast as two
            return order[np.argsort(buckets * (longest + 1) - costs, kind="stable")]
        return order[np.lexsort((-costs, buckets))]

    def _turn(self, epoch: int, number: int, purpose: int) -> Indices:
        """Return a permutation of `range(number)`."""
        settings = OrderSettings(derive_key(self._seed, purpose), shuffle=True, window=0, run_length=1)
        return Order(number, settings).indices(epoch, np.arange(number, dtype=np.int64))


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
        uneven: Literal["pad", "drop", "exact"] = "pad",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Start with epoch 0. With several ranks and no seed, this blocks until all ranks are here.

        Args:
            lengths: `(n,)` length of each sample: a list, an array or a tensor of integers. It is copied.
            batch_size: Samples in a batch of one rank.
            bucket_size: Samples that are sorted together, rounded up to whole batches. None: 100 batches. More means
                less padding and less mixing.
            shuffle: Whether to shuffle. If not, buckets follow the order of the dataset.
            seed: Seed of the order. None: that of torch's default generator; with several ranks, that of rank 0.
            drop_last: Whether to leave out the last batch of an epoch if it is smaller.
            uneven: What happens in the last step if there aren't batches for all ranks: `"pad"` repeats batches,
                `"drop"` leaves them out, `"exact"` gives none to some ranks.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: The number of this rank. Give `num_replicas`, too.

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
        bucket_size = -(-min(wanted, max(len(costs), 1)) // size) * size  # whole batches: none is cut in two
        self._num_unmoved = int(len(costs) % size > 0 and not self.drop_last)  # it has less samples than the others
        facts = {"batch_size": self.batch_size, "bucket_size": bucket_size, "drop_last": int(self.drop_last)}
        ranks, members = ranks_of(num_replicas, rank), np.arange(len(costs), dtype=np.int64)
        self._num_samples = len(costs)
        super().__init__(ranks, uneven, seed, shuffle, costs, members, bucket_size, facts)

    def _cut(self, order: Indices) -> tuple[Indices, Indices]:
        num_samples = len(order)
        size = min(self.batch_size, num_samples + 1)
        ends = np.arange(size, num_samples + size, size, dtype=np.int64)
        stops = ends[: num_samples // size] if self.drop_last else np.minimum(ends, num_samples)
        return self._sorted(order), stops


class Oversized(str, Enum):
    """What becomes of a sample that is longer than the budget."""

    RAISE = "raise"
    """It is a `ValueError`."""
    DROP = "drop"
    """It is left out of every epoch, and a warning says how many are."""
    ALONE = "alone"
    """It is a batch of its own, which exceeds the budget."""


class Fit(str, Enum):
    """How batches of samples that aren't padded are filled."""

    NEXT = "next"
    """With the next sample, as long as it fits."""
    BEST = "best"
    """With the longest sample left, the next ones, and then the longest that still fits."""


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
        fit: Literal["next", "best"] = "next",
        balance: int = 1,
        pad_to_multiple_of: int = 1,
        oversized: Literal["raise", "drop", "alone"] = "raise",
        bucket_size: int = BUCKET_SIZE,
        shuffle: bool = True,
        seed: int | None = None,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Start with epoch 0. With several ranks and no seed, this blocks until all ranks are here.

        Args:
            lengths: `(n,)` length of each sample in tokens: a list, an array or a tensor of integers. It is copied.
            max_tokens: Budget of a batch of one rank.
            max_samples: Maximum of samples in a batch. None: no maximum.
            padded: Whether all samples of a batch are padded to its longest one. Then a batch costs its longest sample
                times its samples. Otherwise it costs the sum of its lengths, and buckets aren't sorted.
            fit: How batches are filled with `padded=False`. `"next"` takes the samples in shuffled order. `"best"`
                begins each batch with the longest sample left in the bucket, goes on in shuffled order, and fills the
                rest with the longest sample that fits: with log-normal lengths, batches are 99.6 % full. Then a bucket
                has at least 100 batches.
            balance: So many batches of nearly equal cost stay together, in permuted order. A number of ranks that
                divides it has equal steps, if it begins at the start of an epoch. Otherwise, one step in `balance`
                batches may be mixed. The batches that fill no block, which cost least, end each epoch. With fewer
                batches than `balance`, the order is the shuffled one. It doesn't depend on the number of ranks. More
                means less mixing.
            pad_to_multiple_of: Lengths are rounded up to a multiple of this. An empty sample counts as one token.
            oversized: What happens to a sample that is longer than `max_tokens`. `"raise"` is a `ValueError`, `"drop"`
                leaves it out, `"alone"` makes it a batch of its own.
            bucket_size: Samples that are sorted or packed together. More means less padding and less mixing.
            shuffle: Whether to shuffle. If not, buckets follow the order of the dataset.
            seed: Seed of the order. None: that of torch's default generator; with several ranks, that of rank 0.
            uneven: What happens in the last step if there aren't batches for all ranks: `"pad"` repeats batches,
                `"drop"` leaves them out, `"exact"` gives none to some ranks.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: The number of this rank. Give `num_replicas`, too.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, a sample is too long, or the ranks have no common seed; or
                `fit="best"` with padding, or `balance` without shuffling.
        """
        refuse_sampler("lengths", lengths)
        self.max_tokens = check_integer("max_tokens", max_tokens, 1)
        most = 0 if max_samples is None else check_integer("max_samples", max_samples, 1)
        multiple = check_integer("pad_to_multiple_of", pad_to_multiple_of, 1, 1 << 20)
        padded = check_flag("padded", padded)
        bucket_size = check_integer("bucket_size", bucket_size, 1)
        self._padded, self._fit = padded, check_choice("fit", fit, Fit)
        if padded and self._fit is Fit.BEST:
            raise ValueError("fit='best' packs samples that aren't padded; give padded=False, too")
        self._balance = check_integer("balance", balance, 1, 1 << 20)
        if self._balance > 1 and not shuffle:
            raise ValueError(f"balance={balance} orders batches by cost; leave it out, or give shuffle=True")
        costs = -(-np.maximum(checked_lengths(lengths), 1) // multiple) * multiple
        members = _members(costs, self.max_tokens, check_choice("oversized", oversized, Oversized))
        self._num_samples, costs = len(costs), costs[members]
        num_samples = max(len(costs), 1)
        self._max_samples = min(most or num_samples, num_samples)
        facts = {"max_tokens": self.max_tokens, "max_samples": most, "padded": int(padded), "bucket_size": bucket_size}
        facts |= {"best fit": int(self._fit is Fit.BEST), "balance": self._balance}
        ranks, together = ranks_of(num_replicas, rank), min(bucket_size, num_samples)
        super().__init__(ranks, uneven, seed, shuffle, costs, members, together, facts)

    def _cut(self, order: Indices) -> tuple[Indices, Indices]:
        num_samples, max_tokens = len(order), min(self.max_tokens, MAX_TOKENS)
        if self._fit is Fit.BEST:
            num_buckets = min(num_samples // self._bucket_size, int(self._costs.sum()) // (100 * max_tokens))
            places, stops = best_fit(self._costs[order], max_tokens, self._max_samples, max(num_buckets, 1))
            return order[places], stops
        order = self._sorted(order) if self._padded else order
        costs, firsts = self._costs[order], np.arange(num_samples, dtype=np.int64)
        if self._padded:
            ends = firsts + np.minimum(max_tokens // costs, self._max_samples)
            np.minimum(ends, (firsts // self._bucket_size + 1) * self._bucket_size, out=ends)
        else:
            sums = np.cumsum(costs)
            ends = np.searchsorted(sums, sums - costs + max_tokens, side="right")
            np.minimum(ends, firsts + self._max_samples, out=ends)
        np.maximum(ends, firsts + 1, out=ends)  # a sample beyond the budget is a batch of its own
        followers, reached, chain = np.minimum(ends, num_samples).tolist(), 0, []
        while reached < num_samples:
            reached = followers[reached]
            chain.append(reached)
        return order, np.array(chain, np.int64)


def _sums(numbers: Indices, starts: Indices, stops: Indices) -> Indices:
    """Return the sum of each range of numbers."""
    sums: Indices = np.concatenate([np.zeros(1, np.int64), np.cumsum(numbers)])
    ranges: Indices = sums[stops] - sums[starts]
    return ranges


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
