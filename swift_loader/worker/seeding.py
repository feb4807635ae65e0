"""Random numbers keyed by sample.

What a sample is made of depends on (seed, epoch, dataset index), and on nothing else: not on the worker that builds it,
nor on what that worker built before, nor on the batch it is in. Unmodified code gets this from `random`, the legacy
`numpy.random` and torch's default generator, which are seeded before each sample; only libraries that are imported
already are touched. New code asks for `sample_rng()`.

Seeding costs 6 us a sample, which is too much for samples of 2 us that draw nothing. So it is done when it is owed: a
batch begins with generators whose next output is known, and when it is built, that output is asked for. If it comes,
nothing was drawn. If not, the batch is built again, with seeds for each sample, as are all batches after it; samples
are then fetched one by one, also where the dataset could give many at once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from swift_loader.permutation import Purpose, derive_key, derive_keys

__all__ = ["Rng", "Seeding", "preserved_generators", "sample_rng", "seed_for_construction", "seed_for_worker"]

_NUM_WATCHED = 256
"""How many seeds watched batches begin with: few, so that what comes after each can be remembered."""


_CONSTRUCTION_KEY = 0x5EED

_SEED_OF_A_FRESH_TORCH = 67280421310721
"""`c10::default_rng_seed_val`."""


class Rng(str, Enum):
    """How the global generators are seeded."""

    SAMPLE = "sample"
    """By (seed, epoch, dataset index)."""
    WORKER = "worker"
    """Once per worker, as torch does: what a sample draws depends on the workers."""
    NONE = "none"
    """Not at all."""


class Seeding:
    """The seeds of one worker's batches. Not thread-safe: the global generators aren't either."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._by_sample = False
        """Whether samples have been seen to draw."""
        self._had_torch = False
        self._watched = 0
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
            _seed_generators(self._collate_key)  # for `__getitems__`, where there is nothing else
        else:
            self._watched = (seed + epoch + indices[0]) % _NUM_WATCHED
            _seed_generators(_watched_key(self._watched))

    def begin_sample(self, number: int) -> None:
        """Seed for the sample at this place in the batch."""
        if self._rng is Rng.SAMPLE:
            _seed_generators(self._keys[number])

    def begin_collate(self) -> None:
        """Seed for what makes a batch of the samples."""
        if self._rng is Rng.SAMPLE:
            _seed_generators(self._collate_key)

    def end(self) -> bool:
        """Return whether the batch has to be built again, with the seeds it should have had."""
        fetched = _enter(self._outer)
        if self._by_sample:
            is_owed = self._rng is Rng.SAMPLE and self._got_torch()
        else:
            self._by_sample = is_owed = (fetched is not None and fetched.drew_in_bulk) or (
                self._rng is Rng.SAMPLE and (self._got_torch() or self._has_drawn())
            )
        return is_owed

    def _got_torch(self) -> bool:
        """Return whether torch was imported while the batch was fetched: then nobody has seeded it."""
        return not self._had_torch and "torch" in sys.modules

    def _has_drawn(self) -> bool:
        return _next_outputs() != _expected_outputs(self._watched, self._had_torch)


class Fetching:
    """The batch that is being fetched, for `sample_rng`; knows the sample by how many there are already."""

    __slots__ = ("_generator", "_number", "drew_in_bulk", "epoch", "in_bulk", "indices", "samples", "seed")

    def __init__(
        self, seed: int, epoch: int, indices: Sequence[int], samples: Sequence[Any], *, in_bulk: bool = False
    ) -> None:
        self.seed = seed
        self.epoch = epoch
        self.indices = indices
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

    def _name(self, number: int) -> tuple[int, ...]:
        if number < len(self.indices):
            return (self.indices[number],)
        return (Purpose.COLLATE.value, self.indices[0])


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
        _seed_generators(_CONSTRUCTION_KEY)


def seed_for_worker(seed: int, rank: int, worker: int, rng: Rng) -> None:
    """Seed a worker that is about to begin: with `Rng.WORKER` this is all the seeding there is."""
    if rng is Rng.WORKER:
        _seed_generators(derive_key(seed, Purpose.WORKER.value, rank, worker))


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global generators back as they were, for code that runs in the user's own process."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.default_generator.get_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None and torch_state is not None:
            torch.default_generator.set_state(torch_state)
        elif "torch" in sys.modules:
            sys.modules["torch"].default_generator.manual_seed(_SEED_OF_A_FRESH_TORCH)


def _seed_generators(key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the legacy generator; it takes 64 bits only at 6 times the time
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(key)


def _next_outputs() -> tuple[int, ...]:
    """Draw 64 bits from each generator."""
    raw = np.random.get_bit_generator().random_raw  # type: ignore[attr-defined]
    outputs = (random.getrandbits(64), raw() << 32 | raw())
    torch = sys.modules.get("torch")
    if torch is None:
        return outputs
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
    return (*outputs, int(drawn))


@lru_cache(2 * _NUM_WATCHED)
def _expected_outputs(watched: int, has_torch: bool) -> tuple[int, ...]:
    del has_torch  # tells apart what the generators are
    _seed_generators(_watched_key(watched))
    return _next_outputs()


def _watched_key(watched: int) -> int:
    return (watched + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
