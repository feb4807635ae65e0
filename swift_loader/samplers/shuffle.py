"""swift_loader's own order for any torch DataLoader: a computed permutation, O(1) to resume.

`ShuffleBatchSampler` yields batches (`batch_sampler=`), `ShuffleSampler` the same batches index by index (`sampler=`).
Both split the order over the ranks as `SwiftLoader` does, and their states can be exchanged with each other's and with
`SwiftLoader`'s. They are `DistributedSampler`s, so that frameworks know that the order is split already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DistributedSampler

from swift_loader.checks import check_choice, check_flag, check_integer, check_optional_integer
from swift_loader.samplers.epochs import Epochs
from swift_loader.samplers.ranks import ranks_of, refuse_sampler, seed_of
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.run import Run
from swift_loader.sampling.shuffle import OrderSettings

__all__ = ["ShuffleBatchSampler", "ShuffleSampler"]


class ShuffleBatchSampler(DistributedSampler[list[int]]):
    """Yields the batches of one rank as lists of indices: the argument `batch_sampler` of a DataLoader."""

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        nearby_shuffle: int | None = None,
        drop_last: bool = False,
        uneven: str | Uneven = Uneven.PAD,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Begin with epoch 0. With several ranks and no seed, it blocks until all ranks are here.

        Args:
            dataset: The dataset, or its length.
            batch_size: Samples in a batch of one rank.
            shuffle: Whether to shuffle.
            seed: Seed of the order. None: that of torch's default generator, rank 0's if there are several ranks.
            nearby_shuffle: Samples that are shuffled together. 0: all. None: as many as batches need to be mixed well,
                while reads stay local.
            drop_last: Whether to leave out the last step of an epoch, if it isn't full on all ranks.
            uneven: What else happens in that step: "pad", "drop" or "exact", as for `SwiftLoader`.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: This rank. Needs `num_replicas`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, or the ranks have no common seed.
        """
        self._epochs = _epochs_of(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            nearby_shuffle=nearby_shuffle,
            drop_last=drop_last,
            uneven=uneven,
            num_replicas=num_replicas,
            rank=rank,
        )
        self.batch_size = int(batch_size)
        self.drop_last = drop_last
        self.num_replicas, self.rank = self._epochs.world_size, self._epochs.rank

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next pass, or the rest of a saved one. It begins with the first `next`."""
        this = self._epochs.passes.begin()
        for cut in self._epochs.cuts(this):
            this.advance(cut.after, at_end=cut.is_last)
            yield cut.indices
        this.end()

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
    def sampler(self) -> ShuffleBatchSampler:
        """Itself: frameworks call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A pass that runs stays as it is."""
        self._epochs.passes.choose(check_integer("epoch", epoch, 0))

    def state_dict(self) -> dict[str, int]:
        """Return the position after the batches drawn so far: plain integers, the same on every rank."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there. Batch size and number of ranks may be others than when it was saved. O(1).

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: The state is of another dataset, seed or order. Nothing has changed then.
        """
        self._epochs.load_state_dict(state)


class ShuffleSampler(DistributedSampler[int]):
    """Yields the indices of one rank, one by one: the argument `sampler` of a DataLoader.

    Give both the same `batch_size`. Then the batches are those of `ShuffleBatchSampler`.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        nearby_shuffle: int | None = None,
        drop_last: bool = False,
        uneven: str | Uneven = Uneven.PAD,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Begin with epoch 0. Arguments and errors are those of `ShuffleBatchSampler`."""
        self._epochs = _epochs_of(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            nearby_shuffle=nearby_shuffle,
            drop_last=drop_last,
            uneven=uneven,
            num_replicas=num_replicas,
            rank=rank,
        )
        self.drop_last = drop_last
        self.num_replicas, self.rank = self._epochs.world_size, self._epochs.rank

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the next pass, or the rest of a saved one. It begins with the first `next`."""
        this = self._epochs.passes.begin()
        is_alone = self._epochs.world_size == 1
        for cut in self._epochs.cuts(this):
            *others, last = cut.indices
            for number, index in enumerate(others, 1):
                if is_alone:  # else the other ranks' samples of this step lie between, and the batch counts as a whole
                    this.advance(cut.before + number, at_end=False)
                yield index
            this.advance(cut.after, at_end=cut.is_last)
            yield last
        this.end()

    def __len__(self) -> int:
        """Return the number of indices of this rank in a whole epoch, with padding."""
        return self._epochs.num_indices

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self._epochs.passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A pass that runs stays as it is."""
        self._epochs.passes.choose(check_integer("epoch", epoch, 0))

    def state_dict(self) -> dict[str, int]:
        """Return the position after the indices drawn so far; with several ranks, after the last whole batch."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there, as `ShuffleBatchSampler.load_state_dict` does."""
        self._epochs.load_state_dict(state)


def _epochs_of(
    dataset: Sized | int,
    batch_size: int,
    *,
    shuffle: bool,
    seed: int | None,
    nearby_shuffle: int | None,
    drop_last: bool,
    uneven: str | Uneven,
    num_replicas: int | None,
    rank: int | None,
) -> Epochs:
    """Check the arguments of a sampler, and return its epochs."""
    num_samples = _length_of(dataset)
    batch_size = check_integer("batch_size", batch_size, 1)
    shuffle, drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
    window = check_optional_integer("nearby_shuffle", nearby_shuffle, 0)
    chosen_uneven = check_choice("uneven", uneven, Uneven)
    ranks = ranks_of(num_replicas, rank)
    common_seed = seed_of(seed, ranks, is_used=shuffle)
    order = OrderSettings.of(seed=common_seed, shuffle=shuffle, window=window, batch_size=batch_size)
    given = {"shuffle": True, "seed": seed is not None, "nearby_shuffle": shuffle and window is not None}
    run = Run(order, frozenset(name for name, is_given in given.items() if is_given))
    settings = PlanSettings(order, batch_size, ranks.world_size, ranks.rank, chosen_uneven, drop_last)
    return Epochs(num_samples, run, settings)


def _length_of(dataset: Sized | int) -> int:
    refuse_sampler("dataset", dataset)
    if isinstance(dataset, Sized):
        return len(dataset)
    return check_integer("dataset", dataset, 0)
