"""Batch samplers with an order of their own, which is computed and never stored.

    epoch, position ──► 53-bit number ──► the weight in whose share of the sum it lies ──► dataset index

An order is cut into batches as `SwiftLoader`'s is, so all ranks have consumed a prefix of it after each step. Memory is
that of the weights. Resuming is O(1).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swift_loader.checks import check_choice, check_flag, check_integer
from swift_loader.ranks.ranks import Ranks
from swift_loader.samplers.base import ResumableSampler, ranks_of, refuse_sampler
from swift_loader.samplers.sharded import cut
from swift_loader.sampling.permutation import derive_key, derive_keys
from swift_loader.sampling.plan import MAX_EPOCH, Plan, PlanSettings, Uneven
from swift_loader.sampling.run import Pass
from swift_loader.sampling.shuffle import Order, OrderSettings

_DRAWS = 0xD2A35
"""Tells the keys of draws from other keys of the same seed."""


class _OrderedBatchSampler(ResumableSampler[list[int]]):
    """Yields the batches of one rank, cut from an order of a subclass."""

    def __init__(self, ranks: Ranks, seed: int | None, batch_size: int, drop_last: bool, uneven: str) -> None:
        self.batch_size, self.drop_last = check_integer("batch_size", batch_size, 1), check_flag("drop_last", drop_last)
        self._uneven = check_choice("uneven", uneven, Uneven)
        super().__init__(ranks, seed)

    def _order(self, settings: OrderSettings) -> Order:
        """Return the order for the seed in these settings."""
        raise NotImplementedError

    def _plan(self) -> Plan:
        order, replicas = OrderSettings(self._seed, shuffle=True, window=0, run_length=1), self.num_replicas
        settings = PlanSettings(order, self.batch_size, replicas, self.rank, self._uneven, self.drop_last)
        return Plan(self._order(order), settings)

    def _rest(self, this: Pass) -> Iterator[list[int]]:
        plan = self._plan()
        for indices, after in cut(plan, this):
            this.advance(after, at_end=after == plan.order.num_samples)
            yield indices
        this.advance(plan.order.num_samples, at_end=True)  # a rank may lack the last batch of an uneven epoch

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return self._plan().num_batches(self.epoch)


@dataclass(frozen=True, slots=True)
class _Draws(Order):
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
        refuse_sampler("weights", weights)
        self._sums = _sums_of(weights)
        wanted = len(self._sums) if num_samples is None else num_samples
        self.num_samples = check_integer("num_samples", wanted, 1, MAX_EPOCH)
        super().__init__(ranks_of(num_replicas, rank), seed, batch_size, drop_last, uneven)
        self._facts = {"num_samples": self.num_samples, "checksum of weights": zlib.crc32(self._sums.data)}

    def _order(self, settings: OrderSettings) -> Order:
        return _Draws(self.num_samples, settings, self._sums)


def _sums_of(weights: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
    """Return the cumulative sums of the weights, as multiples of the largest weight."""
    array = np.asarray(weights)
    if array.ndim != 1:
        raise ValueError(f"weights has {array.ndim} dimensions; it must have one, with the weight of each sample")
    if array.size and array.dtype.kind not in "biuf":
        raise TypeError(f"weights are {array.dtype}; they must be numbers, one for each sample")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ValueError(f"weights[{index}]={array[index]} isn't a weight; it must be finite and at least 0")
    largest = array.max(initial=0)
    if not largest:
        raise ValueError(f"all {array.size} weights are 0; at least one must be above 0, or nothing can be drawn")
    sums = array / np.float64(largest)
    return np.cumsum(sums, out=sums)
