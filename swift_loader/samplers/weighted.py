"""Batch samplers with an order of their own, which is computed and never stored.

    weighted:    epoch, position ──► 53-bit number ──► the weight in whose share of the sum it lies ──► dataset index
    stratified:  position ──► mixture of the labels: label, number ──► permutation of its samples ──► dataset index

An order is cut into batches as `SwiftLoader`'s is, so all ranks have consumed a prefix of it after each step. Memory is
that of the weights or labels. Resuming is O(1).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swift_loader.checks import check_flag, check_integer
from swift_loader.ranks.ranks import Ranks
from swift_loader.samplers.base import ranks_of, refuse_sampler
from swift_loader.samplers.sharded import PlannedBatches
from swift_loader.sampling.mixture import MAX_EXACT, Mix
from swift_loader.sampling.permutation import derive_key, derive_keys
from swift_loader.sampling.plan import MAX_EPOCH, Plan, PlanSettings
from swift_loader.sampling.shuffle import Order, OrderSettings

_DRAWS, _STRATA = 0xD2A35, 0x57A7A
"""Tell the keys of draws and labels from other keys of the same seed."""


class _OrderedBatchSampler(PlannedBatches):
    """Yields the batches of one rank, cut from an order of a subclass."""

    _order: Callable[[OrderSettings], Order]
    """Returns the order for the seed in settings."""

    def __init__(self, ranks: Ranks, seed: int | None, batch_size: int, drop_last: bool, uneven: str) -> None:
        self.batch_size, self.drop_last = check_integer("batch_size", batch_size, 1), check_flag("drop_last", drop_last)
        super().__init__(ranks, seed, uneven)

    def _plan(self) -> Plan:
        order, replicas = OrderSettings(self._seed, shuffle=True, window=0, run_length=1), self.num_replicas
        settings = PlanSettings(order, self.batch_size, replicas, self.rank, self._uneven, self.drop_last)
        return Plan(self._order(order), settings)


@dataclass(frozen=True, slots=True)
class _WeightedOrder(Order):
    """An order of draws with replacement."""

    sums: NDArray[np.float64]
    """`(n,)` cumulative sums of the weights."""

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Order`."""
        keys = derive_keys(derive_key(self.settings.seed, _DRAWS, epoch), positions.astype(np.uint64))
        numbers = (keys >> np.uint64(11)).astype(np.float64) * (self.sums[-1] * 2.0**-53)  # below the last sum
        turn = np.argsort(numbers)  # looking up sorted numbers is three times as fast
        indices = np.empty_like(positions)
        indices[turn] = np.searchsorted(self.sums, numbers[turn], side="right")
        return indices


class WeightedBatchSampler(_OrderedBatchSampler):
    """Yields batches of samples drawn with replacement, in proportion to weights: the argument `batch_sampler`.

    It is torch's `WeightedRandomSampler` for several ranks. Each draw depends on weights, seed, epoch and position in
    the epoch only. So a run may resume after any batch, with another number of ranks or another batch size.
    """

    def __init__(
        self,
        weights: Sequence[float] | NDArray[Any],
        batch_size: int,
        num_samples: int | None = None,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Start with epoch 0. With several ranks and no seed, this blocks until all ranks are here.

        Args:
            weights: `(n,)` weight of each sample: a list, an array or a tensor of numbers. They needn't sum to 1. A
                sample of weight 0 is never drawn. A copy is kept, 8 bytes per sample.
            batch_size: Samples in a batch of one rank.
            num_samples: Draws in an epoch, over all ranks. None: as many as there are weights.
            seed: Seed of the draws. None: that of torch's default generator; with several ranks, that of rank 0.
            drop_last: Whether to leave out the last step of an epoch, if it isn't full on all ranks.
            uneven: What happens in that step otherwise: `"pad"`, `"drop"` or `"exact"`, as for `SwiftLoader`.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: The number of this rank. Give `num_replicas`, too.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, all weights are 0, or the ranks have no common seed.
        """
        sums = _sums_of(weights)
        self.num_samples = check_integer("num_samples", len(sums) if num_samples is None else num_samples, 1, MAX_EPOCH)
        self._order = partial(_WeightedOrder, self.num_samples, sums=sums)
        super().__init__(ranks_of(num_replicas, rank), seed, batch_size, drop_last, uneven)
        self._facts = {"num_samples": self.num_samples, "checksum of weights": zlib.crc32(sums.data)}


def _sums_of(weights: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
    """Return the cumulative sums of the weights, as multiples of the largest weight."""
    array = _checked("weights", weights, "biuf", "numbers")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ValueError(f"weights[{index}]={array[index]} isn't a weight; it must be finite and at least 0")
    if not (largest := array.max()):
        raise ValueError(f"all {array.size} weights are 0; at least one must be above 0, or nothing can be drawn")
    sums = np.divide(array, largest, dtype=np.float64)
    return np.cumsum(sums, out=sums)


@dataclass(frozen=True, slots=True)
class _Strata(Order):
    """A permutation of which each prefix has its share of each label."""

    members: NDArray[np.int64]
    """`(n,)` dataset indices, sorted by label."""
    begins: NDArray[np.int64]
    """Where each label begins there."""
    counts: tuple[int, ...]
    """How many samples each label has."""

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Order`."""
        settings = replace(self.settings, seed=derive_key(self.settings.seed, _STRATA, epoch))
        turn, mix = _mix_of(self.counts, settings)
        labels, places, _ = mix.rows(settings, positions)
        return self.members[self.begins[turn[labels]] + places.astype(np.int64)]


@lru_cache(maxsize=2)
def _mix_of(counts: tuple[int, ...], settings: OrderSettings) -> tuple[NDArray[np.int64], Mix]:
    """Return the labels in an order that depends on the seed, and their mixture.

    Labels of equal counts come in that order. With the same one in each epoch, the same labels would always share a
    batch if there are more labels than samples in it.
    """
    turn = Order(len(counts), settings).indices(0, np.arange(len(counts)))
    lengths = tuple(counts[number] for number in turn)
    weights = ((0, tuple(map(float, lengths))),)
    return turn, Mix((), lengths, sum(lengths), weights, "")


class StratifiedBatchSampler(_OrderedBatchSampler):
    """Yields batches in which each label has its share of the dataset: the argument `batch_sampler` of a DataLoader.

    Each epoch visits every sample once, in another order. Of its first n samples, each label has its share within two
    samples, for any n. The order depends on labels, seed and epoch only. So a run may resume after any batch, with
    another number of ranks or another batch size.
    """

    def __init__(
        self,
        labels: Sequence[int] | Sequence[str] | NDArray[Any],
        batch_size: int,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Start with epoch 0. With several ranks and no seed, this blocks until all ranks are here.

        Args:
            labels: `(n,)` label of each sample: a list, an array, a tensor or a column of a table, of integers,
                booleans or strings, also categorical. At most 2**31. The sampler keeps 8 bytes per sample. The first
                batch of an epoch takes 5 us per label.
            batch_size: Samples in a batch of one rank.
            seed: Seed of the order. None: that of torch's default generator; with several ranks, that of rank 0.
            drop_last: Whether to leave out the last step of an epoch, if it isn't full on all ranks.
            uneven: What happens in that step otherwise: `"pad"`, `"drop"` or `"exact"`, as for `SwiftLoader`.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: The number of this rank. Give `num_replicas`, too.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, or the ranks have no common seed.
        """
        array = _checked("labels", labels, "biuUSOT", "integers or strings")
        if array.dtype.kind in "OT":  # of pandas, polars and pyarrow
            array = _of_objects(array.astype(object))
        members = np.argsort(array, kind="stable")
        array = array[members]
        begins = np.flatnonzero(np.concatenate([[True], array[1:] != array[:-1]]))
        counts = tuple(np.diff(begins, append=array.size).tolist())
        self._order = partial(_Strata, array.size, members=members, begins=begins, counts=counts)
        super().__init__(ranks_of(num_replicas, rank), seed, batch_size, drop_last, uneven)
        self._facts = {"checksum of labels": zlib.crc32(begins.data, zlib.crc32(members.data))}


def _of_objects(labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels that are Python objects, `(n,)`, all strings or all integers."""
    wanted = str if isinstance(labels[0], str) else (int, np.integer)
    for index, label in enumerate(labels.tolist()):
        if not isinstance(label, wanted):
            raise TypeError(
                f"labels[{index}]={label!r} is a {type(label).__name__}; labels must be all integers or all strings, "
                f"one for each sample. Give samples without a label one of their own, or leave them out of the dataset"
            )
    return labels if wanted is str else labels.astype(np.int64)


def _checked(name: str, values: Any, kinds: str, what: str) -> NDArray[Any]:
    """Return one value for each sample as an array, `(n,)`, of these kinds of types."""
    refuse_sampler(name, values)
    array = np.asarray(values)
    if array.ndim != 1 or not 1 <= array.size <= MAX_EXACT:
        raise ValueError(f"{name} has the shape {array.shape}; it must be (n,), with n from 1 to 2**31")
    if array.dtype.kind not in kinds:
        raise TypeError(f"{name} are {array.dtype}; they must be {what}, one for each sample")
    return array
