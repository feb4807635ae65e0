"""Random numbers keyed by sample.

What a sample is made of depends on (seed, epoch, dataset index), and on nothing else: not on the worker that builds it,
nor on what that worker built before, nor on the batch it is in. Unmodified code gets this from `random`, the legacy
`numpy.random` and torch's default generator, which are seeded before each sample; only libraries that are imported
already are touched. New code asks for `sample_rng()`.

Seeding costs 6 us a sample, which is too much for samples of 2 us that draw nothing. So it is done when it is owed: a
batch begins with generators whose next output is known, and when it is built, that output is asked for. If it comes,
nothing was drawn. If not, the batch is built again, with seeds for each sample, as are all batches after it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from swift_loader.permutation import derive_key, derive_keys

__all__ = ["Rng", "Seeding", "preserved_generators", "sample_rng", "seed_for_construction", "seed_for_worker"]

_NUM_WATCHED = 256
"""How many seeds watched batches begin with: few, so that what comes after each can be remembered."""


class Rng(str, Enum):
    """How the global generators are seeded."""

    SAMPLE = "sample"
    """By (seed, epoch, dataset index)."""
    WORKER = "worker"
    """Once per worker, as torch does: what a sample draws depends on the workers."""
    NONE = "none"
    """Not at all."""


class _Purpose(int, Enum):
    """Keeps keys apart that have the same numbers; those of the order end below."""

    SAMPLE = 5
    COLLATE = 6
    GENERATOR = 7
    CONSTRUCTION = 8
    WORKER = 9


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

    def begin(self, fetching: Fetching) -> None:
        """Seed for a batch."""
        _current.set(fetching)
        if self._rng is not Rng.SAMPLE:
            return
        seed, epoch, indices = fetching.seed, fetching.epoch, fetching.indices
        self._had_torch = "torch" in sys.modules
        if self._by_sample:
            base = derive_key(seed, _Purpose.SAMPLE.value, epoch)
            self._keys = derive_keys(base, np.array(indices, np.uint64)).tolist()
            self._collate_key = derive_key(base, _Purpose.COLLATE.value, indices[0])
            _seed_generators(self._keys[0])  # for `__getitems__`, which fetches a batch at once
        else:
            self._watched = (seed + epoch + indices[0]) % _NUM_WATCHED
            _seed_generators(_watched_key(self._watched))

    @property
    def by_sample(self) -> bool:
        """Whether `begin_sample` and `begin_collate` are to be called."""
        return self._by_sample

    def begin_sample(self, number: int) -> None:
        """Seed for the sample at this place in the batch."""
        _seed_generators(self._keys[number])

    def begin_collate(self) -> None:
        """Seed for what makes a batch of the samples."""
        _seed_generators(self._collate_key)

    def end(self) -> bool:
        """Return whether the batch has to be built again, with the seeds it should have had."""
        _current.set(None)
        if self._rng is not Rng.SAMPLE:
            return False
        if not self._had_torch and "torch" in sys.modules:  # imported while fetching: nobody has seeded it
            self._by_sample = True
            return True
        if self._by_sample or _next_outputs() == _expected_outputs(self._watched, self._had_torch):
            return False
        self._by_sample = True
        return True


class Fetching:
    """The batch that is being fetched, for `sample_rng`; knows the sample by how many there are already."""

    __slots__ = ("_generator", "_number", "epoch", "indices", "samples", "seed")

    def __init__(self, seed: int, epoch: int, indices: Sequence[int], samples: Sequence[Any]) -> None:
        self.seed = seed
        self.epoch = epoch
        self.indices = indices
        self.samples = samples
        """Grows while the batch is fetched."""
        self._number = -1
        self._generator: np.random.Generator | None = None

    def generator(self) -> np.random.Generator:
        """Return the generator of the sample that is being fetched, or, after the last one, that of the batch."""
        number = len(self.samples)
        if self._generator is None or number != self._number:
            self._number = number
            key = derive_key(self.seed, _Purpose.GENERATOR.value, self.epoch, *self._name(number))
            self._generator = np.random.Generator(np.random.Philox(key=key))
        return self._generator

    def _name(self, number: int) -> tuple[int, ...]:
        if number < len(self.indices):
            return (self.indices[number],)
        return (_Purpose.COLLATE.value, self.indices[0])


_current: ContextVar[Fetching | None] = ContextVar("swift_loader_fetching", default=None)


def sample_rng() -> np.random.Generator:
    """Return the random generator of the sample that is being fetched; for use in `__getitem__` and transforms.

    Keyed by (seed, epoch, dataset index): the same numbers whatever the number of workers, after a resume, and others
    in each epoch. Asked twice for one sample, it is the same generator, which goes on. In a `collate_fn` it is keyed by
    the batch's first index, and in `__getitems__`, too. Outside of a loader it is a fresh, unseeded generator, so that
    a dataset can be tried out by itself. It costs 15 us.
    """
    fetching = _current.get()
    return np.random.default_rng() if fetching is None else fetching.generator()


def seed_for_construction(seed: int, rng: Rng) -> None:
    """Seed for the dataset's constructor: it gives the same dataset in each worker and on each rank."""
    if rng is not Rng.NONE:
        _seed_generators(derive_key(seed, _Purpose.CONSTRUCTION.value))


def seed_for_worker(seed: int, rank: int, worker: int, rng: Rng) -> None:
    """Seed a worker that is about to begin: with `Rng.WORKER` this is all the seeding there is."""
    if rng is Rng.WORKER:
        _seed_generators(derive_key(seed, _Purpose.WORKER.value, rank, worker))


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global generators back as they were, for code that runs in the user's own process."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)


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
    return outputs if torch is None else (*outputs, int(torch.empty((), dtype=torch.int64).random_()))


@lru_cache(2 * _NUM_WATCHED)
def _expected_outputs(watched: int, has_torch: bool) -> tuple[int, ...]:
    del has_torch  # tells apart what the generators are
    _seed_generators(_watched_key(watched))
    return _next_outputs()


def _watched_key(watched: int) -> int:
    return (watched + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
