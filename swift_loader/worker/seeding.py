"""Random numbers keyed by sample.

What a sample is made of depends on (seed, epoch, dataset index), and on nothing else: not on the worker that builds it,
nor on what that worker built before, nor on the batch it is in. Unmodified code gets this from `random`, the legacy
`numpy.random` and torch's default generator, which are seeded before each sample; only libraries that are imported
already are touched. New code asks for `sample_rng()`.

Seeding costs 9 us a sample, which is too much for samples of 2 us that draw nothing. So it is done when it is owed: the
generators are looked at after each batch. If they are as before, nothing was drawn. If not, the batch is built again,
with seeds for each sample, as are all batches after it; samples are then fetched one by one, also where the dataset
could give many at once.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

import numpy as np

from swift_loader.permutation import Purpose, derive_key, derive_keys
from swift_loader.worker.generators import Snapshot, seed_generators, snapshot_generators

__all__ = ["Rng", "Seeding", "sample_rng", "seed_for_construction", "seed_for_worker"]

_CONSTRUCTION_KEY = 0x5EED

_IDLE_KEY = 0x1D1E
"""Of the generators while nothing is drawn from them."""


class Rng(str, Enum):
    """How the global generators are seeded."""

    SAMPLE = "sample"
    """By (seed, epoch, dataset index)."""
    WORKER = "worker"
    """Once per worker: what a sample draws depends on which one builds it, and on what that one built before."""
    NONE = "none"
    """Not at all."""


class Seeding:
    """The seeds of one worker's batches. Not thread-safe: the global generators aren't either."""

    def __init__(self, rng: Rng, *, by_sample: bool = False) -> None:
        self._rng = rng
        self._by_sample = by_sample
        """Whether samples have been seen to draw, or are to be seeded in any case."""
        self._had_torch = False
        self._idle: Snapshot | None = None
        """What the generators look like as long as nothing is drawn."""
        self._keys: list[int] = []
        self._collate_key = 0
        self._outer: Fetching | None = None

    @property
    def by_sample(self) -> bool:
        """Whether samples draw: then they have to be fetched one by one, each after `begin_sample`."""
        return self._by_sample

    def begin(self, fetching: Fetching) -> None:
        """Seed for a batch. Each `begin` is followed by an `end`."""
        self._outer = _enter(fetching)
        if self._rng is not Rng.SAMPLE:
            return
        seed, epoch, indices = fetching.seed, fetching.epoch, fetching.indices
        self._had_torch = "torch" in sys.modules
        if self._by_sample:
            base = derive_key(seed, Purpose.SAMPLE.value, epoch)
            self._keys = derive_keys(base, np.array(indices, np.uint64)).tolist()
            self._collate_key = derive_key(seed, Purpose.COLLATE.value, epoch, indices[0])
            seed_generators(self._collate_key)  # for `__getitems__`, where there is nothing else
        elif self._idle is None or snapshot_generators() != self._idle:
            seed_generators(_IDLE_KEY)
            self._idle = snapshot_generators()

    def begin_sample(self, number: int) -> None:
        """Seed for the sample at this place in the batch."""
        if self._rng is Rng.SAMPLE:
            seed_generators(self._keys[number])

    def leave_out(self, fetching: Fetching) -> None:
        """Have the sample that is being fetched left out of the batch."""
        number = len(fetching.samples)
        fetching.leave_out()
        if self._keys:
            del self._keys[number]

    def replace(self, fetching: Fetching, index: int) -> None:
        """Have another sample fetched in the place of the one that is being fetched, keyed by its own index."""
        fetching.replace(index)
        if self._keys:
            self._keys[len(fetching.samples)] = derive_key(fetching.seed, Purpose.SAMPLE.value, fetching.epoch, index)

    def begin_collate(self) -> None:
        """Seed for what makes a batch of the samples."""
        if self._rng is Rng.SAMPLE:
            seed_generators(self._collate_key)

    def end(self) -> bool:
        """Return whether the batch has to be built again, with the seeds it should have had."""
        fetched = _enter(self._outer)
        if self._by_sample:
            is_owed = self._rng is Rng.SAMPLE and self._got_torch()
        else:
            self._by_sample = is_owed = (fetched is not None and fetched.drew_in_bulk) or (
                self._rng is Rng.SAMPLE and snapshot_generators() != self._idle
            )
        return is_owed

    def _got_torch(self) -> bool:
        """Return whether torch was imported while the batch was fetched: then nobody has seeded it."""
        return not self._had_torch and "torch" in sys.modules


class Fetching:
    """The batch that is being fetched, for `sample_rng`; knows the sample by how many there are already."""

    __slots__ = ("_first", "_generator", "_number", "drew_in_bulk", "epoch", "in_bulk", "indices", "samples", "seed")

    def __init__(self, seed: int, epoch: int, indices: list[int], samples: list[Any], *, in_bulk: bool = False) -> None:
        self.seed = seed
        self.epoch = epoch
        self._first = indices[0]
        self.indices = indices
        """What the batch consists of; `indices[len(samples)]` is being fetched. Never changed in place."""
        self.samples = samples
        """Grows while the batch is fetched."""
        self.in_bulk = in_bulk
        """Whether all samples are asked for at once, although they could be one by one."""
        self.drew_in_bulk = False
        self._number = -1
        self._generator: np.random.Generator | None = None

    def generator(self) -> np.random.Generator:
        """Return the generator of the sample that is being fetched, or, after the last one, that of the batch."""
        number = len(self.samples)
        if self._generator is None or number != self._number:
            self._number = number
            self.drew_in_bulk |= self.in_bulk and number == 0
            key = derive_key(self.seed, Purpose.GENERATOR.value, self.epoch, *self._name(number))
            self._generator = np.random.Generator(np.random.Philox(key=key))
        return self._generator

    @property
    def index(self) -> int:
        """The dataset index of the sample that is being fetched."""
        return self.indices[len(self.samples)]

    def fetch_one_by_one(self) -> None:
        """Begin again, with one sample at a time."""
        self.samples.clear()
        self.in_bulk = False
        self._generator = None

    def leave_out(self) -> None:
        """Do without the sample that is being fetched: the next one takes its place."""
        number = len(self.samples)
        self.indices = [*self.indices[:number], *self.indices[number + 1 :]]
        self._generator = None

    def replace(self, index: int) -> None:
        """Go on with another sample in the place of the one that is being fetched."""
        number = len(self.samples)
        self.indices = [*self.indices[:number], index, *self.indices[number + 1 :]]
        self._generator = None

    def _name(self, number: int) -> tuple[int, ...]:
        if number < len(self.indices):
            return (self.indices[number],)
        return (Purpose.COLLATE.value, self._first)


_current: Fetching | None = None
"""Of the process, as the generators are: threads that the dataset starts find it, too."""


def _enter(fetching: Fetching | None) -> Fetching | None:
    """Make a batch the one that is being fetched; return the one that was."""
    global _current
    outer, _current = _current, fetching
    return outer


def sample_rng() -> np.random.Generator:
    """Return the random generator of the sample that is being fetched; for use in `__getitem__` and transforms.

    Keyed by (seed, epoch, dataset index): the same numbers whatever the number of workers, after a resume, and others
    in each epoch. Asked twice for one sample, it is the same generator, which goes on. In a `collate_fn` it is keyed by
    the batch's first index, and so in the `__getitems__` of a dataset without `__getitem__`. Outside of a loader it is
    a fresh, unseeded generator, so that a dataset can be tried out by itself. It costs 15 us.
    """
    return np.random.default_rng() if _current is None else _current.generator()


def seed_for_construction(rng: Rng) -> None:
    """Seed for the dataset's constructor, always alike: what it draws is the same in each worker, rank and run."""
    if rng is not Rng.NONE:
        seed_generators(_CONSTRUCTION_KEY)


def seed_for_worker(seed: int, rank: int, worker: int, rng: Rng) -> None:
    """Seed a worker that is about to begin: with `Rng.WORKER` this is all the seeding there is."""
    if rng is Rng.WORKER:
        seed_generators(derive_key(seed, Purpose.WORKER.value, rank, worker))
