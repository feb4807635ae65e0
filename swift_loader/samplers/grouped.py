"""The epochs of a sampler that groups samples by length: batches of one rank, with a position that can be saved."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from swift_loader.samplers.buckets import Batches, Grouping, Indices
from swift_loader.samplers.passes import Passes
from swift_loader.samplers.shards import Shard
from swift_loader.samplers.states import VERSION, check_same, saved_fields

__all__ = ["GroupedEpochs", "checked_lengths"]

MAX_TOTAL = 2.0**61
"""Lengths are rounded up and added as 64-bit integers."""


def checked_lengths(lengths: Sequence[int] | Indices) -> Indices:
    """Return the lengths as a new array, `(n,) int64`.

    Raises:
        TypeError: They aren't integers.
        ValueError: They aren't one-dimensional, or one is negative; the message names the first one.
    """
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


class GroupedEpochs:
    """The epochs of one rank. Memory is O(samples). Not thread-safe."""

    def __init__(
        self, name: str, grouping: Grouping, shard: Shard, seed: int, *, has_own_seed: bool, facts: Mapping[str, int]
    ) -> None:
        """Begin with epoch 0.

        Args:
            name: Name of the sampler's class, for its states.
            grouping: How the samples of an epoch become batches.
            shard: Which of them are this rank's.
            seed: Seed of the order.
            has_own_seed: Whether the user chose the seed. A state with another one raises `StateMismatch`.
            facts: What else the order depends on. A state with others raises `StateMismatch`.
        """
        self.passes = Passes()
        self._name = name
        self._grouping = grouping
        self._shard = shard
        self._seed = seed
        self._has_own_seed = has_own_seed
        checksum = zlib.crc32(grouping.lengths.tobytes())
        self._facts = {**facts, "shuffle": int(grouping.shuffle), "checksum of lengths": checksum}
        self._made: tuple[int, int, Batches] | None = None
        """Seed and epoch of the batches that were made last, and these."""

    @property
    def num_batches(self) -> int:
        """Batches of this rank in the whole epoch. It may differ from epoch to epoch."""
        return self._shard.num_steps(len(self._batches(self.passes.epoch)))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next pass."""
        this, shard = self.passes.begin(), self._shard
        batches = self._batches(this.epoch)
        position, num_batches = this.position, len(batches)
        while (picked := shard.pick(num_batches - position)) is not None:
            number, is_last = position + picked, shard.is_last(num_batches - position)
            position = num_batches if is_last else min(num_batches, position + shard.world_size)
            this.advance(position, at_end=is_last)
            yield batches[number]
        this.advance(num_batches, at_end=True)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position of the pass."""
        this = self.passes.current
        return {
            "version": VERSION,
            "sampler": self._name,
            "seed": self._seed,
            "epoch": this.epoch,
            "position": this.position,
            "finished": int(this.at_end),
            **self._facts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: It is of another sampler or dataset, or of other options. Nothing has changed then.
        """
        fields = saved_fields(state, self._name, ["seed", "epoch", "position", "finished", *self._facts])
        for name, present in self._facts.items():
            check_same(name, fields[name], present)
        if self._has_own_seed:
            check_same("seed", fields["seed"], self._seed)
        self._seed = fields["seed"]
        self.passes.restore(fields["epoch"], fields["position"], at_end=bool(fields["finished"]))

    def _batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch over all ranks. Those made last are kept."""
        if self._made is None or self._made[:2] != (self._seed, epoch):
            self._made = None  # free its memory first
            self._made = (self._seed, epoch, self._grouping.batches(self._seed, epoch))
        return self._made[2]

    def __repr__(self) -> str:
        return f"<GroupedEpochs of {self._name}, {self.passes!r}>"
