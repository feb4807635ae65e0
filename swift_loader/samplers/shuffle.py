"""swift_loader's own order for any torch DataLoader: a computed permutation, O(1) to resume.

`ShuffleBatchSampler` yields batches (`batch_sampler=`), `ShuffleSampler` the same batches index by index (`sampler=`).
Both split the order over the ranks as `SwiftLoader` does, and their states can be exchanged with each other's and with
`SwiftLoader`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from swift_loader.checks import check_choice, check_flag, check_integer, check_optional_integer
from swift_loader.samplers.base import ResumableSampler, ranks_of, refuse_sampler
from swift_loader.samplers.passes import Pass
from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings, Position, Uneven
from swift_loader.sampling.run import Checkpoint, Run
from swift_loader.sampling.shuffle import OrderSettings

_Item = TypeVar("_Item")


class _Cut(NamedTuple):
    """One batch of this rank, and the positions around it, in samples over all ranks."""

    indices: list[int]
    before: int
    after: int
    is_last: bool
    """Whether no rank has another one."""


class _PlannedSampler(ResumableSampler[_Item]):
    """An order that is cut into the batches of one rank. Memory is O(batch), and resuming is O(1)."""

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
        refuse_sampler("dataset", dataset)
        self._num_samples = len(dataset) if isinstance(dataset, Sized) else check_integer("dataset", dataset, 0)
        batch_size = check_integer("batch_size", batch_size, 1)
        shuffle, self.drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
        window = check_optional_integer("nearby_shuffle", nearby_shuffle, 0)
        chosen_uneven, ranks = check_choice("uneven", uneven, Uneven), ranks_of(num_replicas, rank)
        super().__init__(ranks, seed, is_seed_used=shuffle)
        order = OrderSettings.of(seed=self._seed, shuffle=shuffle, window=window, batch_size=batch_size)
        given = {"shuffle": True, "seed": seed is not None, "nearby_shuffle": shuffle and window is not None}
        self._run = Run(order, frozenset(name for name, is_given in given.items() if is_given))
        """The order. A loaded state may replace it."""
        self._run.note_length(self._num_samples)
        self._settings = PlanSettings(order, batch_size, ranks.world_size, ranks.rank, chosen_uneven, self.drop_last)
        """How the order is cut. The `order` in it isn't used."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after what was drawn so far: plain integers, the same on every rank.

        With several ranks, `ShuffleSampler` counts whole batches.
        """
        this = self._passes.current
        position = self._num_samples if this.at_end else this.position
        return Checkpoint(self._run.order, Position(this.epoch, position), self._num_samples).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there. Batch size and number of ranks may be others than when it was saved. O(1).

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: The state is of another dataset, seed or order. Nothing has changed then.
        """
        self._run.load_state_dict(state)
        position = self._run.progress.position
        at_end = 0 < self._num_samples <= position.num_samples
        self._passes.restore(position.epoch, position.num_samples, at_end=at_end)

    def _plan(self) -> Plan:
        return Plan.of(self._num_samples, replace(self._settings, order=self._run.order))

    def _cuts(self, this: Pass) -> Iterator[_Cut]:
        """Yield the batches of a pass. Call `this.advance` for each."""
        plan = self._plan()
        settings, step = plan.settings.resumed_at(Position(this.epoch, this.position))
        plan = replace(plan, settings=settings)
        reader, num_batches, before = PlanReader(plan), plan.num_batches(this.epoch), this.position
        while step < num_batches:
            after = plan.position_after(this.epoch, step).num_samples
            indices = reader.batch(this.epoch, step).indices.tolist()
            step += 1
            yield _Cut(indices, before, after, after == self._num_samples)
            before = after


class ShuffleBatchSampler(_PlannedSampler[list[int]]):
    """Yields the batches of one rank as lists of indices: the argument `batch_sampler` of a DataLoader."""

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self._settings.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next pass, or the rest of a saved one. It begins with the first `next`."""
        this = self._passes.begin()
        for cut in self._cuts(this):
            this.advance(cut.after, at_end=cut.is_last)
            yield cut.indices
        this.end()

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return self._plan().num_batches(self.epoch)


class ShuffleSampler(_PlannedSampler[int]):
    """Yields the indices of one rank, one by one: the argument `sampler` of a DataLoader.

    Give both the same `batch_size`. Then the batches are those of `ShuffleBatchSampler`.
    """

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the next pass, or the rest of a saved one. It begins with the first `next`."""
        this = self._passes.begin()
        for cut in self._cuts(this):
            *others, last = cut.indices
            for number, index in enumerate(others, 1):
                if self.num_replicas == 1:  # else the other ranks' samples of this step lie between: it counts whole
                    this.advance(cut.before + number, at_end=False)
                yield index
            this.advance(cut.after, at_end=cut.is_last)
            yield last
        this.end()

    def __len__(self) -> int:
        """Return the number of indices of this rank in a whole epoch, with padding."""
        return self._plan().num_samples(self.epoch)
