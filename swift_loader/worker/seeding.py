"""Random numbers keyed by sample.

A sample depends on (seed, epoch, dataset index) and on nothing else: not on the worker that builds it, not on what that
worker built before, and not on the batch that it is in. Existing code needs no change: `random`, the legacy
`numpy.random` and torch's default generator are seeded before each sample. Only libraries that are already imported are
touched. New code calls `sample_rng()`.

Seeding takes 9 us per sample. That is too much for samples that take 2 us and draw nothing, so it is lazy: the
generators' states are compared after each batch. If they haven't changed, nothing was drawn. If they have, the batch is
built again with a seed for each sample, as are the later ones. Samples are then fetched one by one, even if the dataset
has `__getitems__`. So in the first batch of each further epoch, each sample is looked at: if none draws any more, no
sample is seeded from then on. If only the `collate_fn` draws, only that is seeded. And only the generators are seeded
from which was drawn in that batch. If a later batch draws from another one, too, it is built again with seeds for all.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.random  # NumPy does it when it is first used, which takes 15 ms in each worker

from swift_loader.sampling.permutation import Purpose, derive_key, derive_keys

if TYPE_CHECKING:
    import torch

# The global random generators of a process: `random`, the legacy `numpy.random`, and torch's default generator.
#
# Only libraries that are already imported are touched. A snapshot copies from the generators' memory, because the
# documented functions are too slow to call after every batch: 10 us for Python's state, 44 us for NumPy's.

Snapshot = tuple[object, ...]
"""Two snapshots are equal if nothing was drawn or seeded in between, and torch wasn't imported in between."""

_NUM_WORDS = 624
"""32-bit words in the state of a Mersenne twister. A 32-bit index is before them (Python) or after them (NumPy)."""

_STATE_BYTES = 4 * (_NUM_WORDS + 1)

_LOOKED_AT_BYTES = 4 * (4 + 1)
"""The index and the four words next to it. Each draw moves the index. When it has the same value again, the words are
new."""

_SEED_OF_A_FRESH_TORCH = 67280421310721
"""`c10::default_rng_seed_val`."""


_PYTHONS, _NUMPYS, _TORCHS = range(3)
"""Their places in a snapshot."""

ALL = frozenset((_PYTHONS, _NUMPYS, _TORCHS))


def seed_generators(key: int, which: frozenset[int] = ALL) -> None:
    """Seed them with a 64-bit key."""
    if _PYTHONS in which:
        random.seed(key)
    if _NUMPYS in which:
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the legacy generator; a 64-bit seed takes 6 times as long
    torch = sys.modules.get("torch") if _TORCHS in which else None
    if torch is not None:
        torch.default_generator.manual_seed(key)


def snapshot_generators() -> Snapshot:
    """Return a snapshot, to compare with a later one. It takes 0.5 us, with torch 2.5 us."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _snapshot_python(), _snapshot_numpy()
    return _snapshot_python(), _snapshot_numpy(), _snapshot_torch(torch.default_generator)


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The full states of the generators, to continue with later. Taking them takes 50 us."""

    python: tuple[Any, ...]
    numpy_generator: Any
    """The user may have set another one."""
    numpy_state: Any
    torch: Any
    """None: torch wasn't imported."""

    @classmethod
    def take(cls) -> GeneratorStates:
        """Return the present states."""
        torch = sys.modules.get("torch")
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        torch_state = None if torch is None else torch.default_generator.get_state()
        numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the legacy generator
        return cls(random.getstate(), generator, numpy_state, torch_state)

    def restore(self) -> None:
        """Continue with these states."""
        random.setstate(self.python)
        if np.random.get_bit_generator() is not self.numpy_generator:  # type: ignore[attr-defined]
            np.random.set_bit_generator(self.numpy_generator)  # type: ignore[attr-defined]
        np.random.set_state(self.numpy_state)  # noqa: NPY002 - the legacy generator
        if self.torch is not None:
            sys.modules["torch"].default_generator.set_state(self.torch)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators' states afterwards, for code that runs in the user's own process."""
    states, is_garbage = GeneratorStates.take(), False
    try:
        yield
    except GeneratorExit:  # of a `with` that an interrupt has left before its block; long ago, maybe
        is_garbage = True
        raise
    finally:
        if not is_garbage:
            states.restore()
        if not is_garbage and states.torch is None and "torch" in sys.modules:
            sys.modules["torch"].default_generator.manual_seed(_SEED_OF_A_FRESH_TORCH)


def _snapshot_python() -> object:
    address = _address_of_python()
    return random.getstate() if address is None else ctypes.string_at(address, _LOOKED_AT_BYTES)


def _snapshot_numpy() -> object:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:  # the user has set another one
        return pickle.dumps(generator.state)
    end = generator.ctypes.state_address + _STATE_BYTES
    return ctypes.string_at(end - _LOOKED_AT_BYTES, _LOOKED_AT_BYTES)


def _snapshot_torch(generator: torch.Generator) -> object:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


@cache
def _address_of_python() -> int | None:
    """Return the address of the state of `random`, right after the object's header; None if it isn't there.

    The layout is private to CPython, so this function checks it first.
    """
    generator: Any = random._inst  # noqa: SLF001
    address = id(generator) + object.__basicsize__
    if type(generator).__basicsize__ < object.__basicsize__ + _STATE_BYTES:
        return None
    *words, index = generator.getstate()[1]
    is_there = ctypes.string_at(address, _STATE_BYTES) == np.array([index, *words], np.uint32).tobytes()
    return address if is_there else None


_CONSTRUCTION_KEY = 0x5EED

_IDLE_KEY = 0x1D1E
"""Seed of the generators as long as nothing is drawn from them."""


class Rng(str, Enum):
    """How the loader seeds the global generators."""

    SAMPLE = "sample"
    """Before each sample, by (seed, epoch, dataset index)."""
    WORKER = "worker"
    """Once per worker. A sample's numbers depend on the worker that builds it, and on what that worker built before."""
    NONE = "none"
    """Never."""


class Seeding:
    """Seeds the batches of one worker. Not thread-safe, as the global generators aren't."""

    def __init__(self, rng: Rng, *, by_sample: bool = False, builds_once: bool = False) -> None:
        """`builds_once`: a batch can't be built again, so each sample is seeded, also if none draws."""
        self._rng = rng
        self.by_sample = by_sample or builds_once
        """Whether each sample is seeded. If so, fetch samples one by one, each after `begin_sample`."""
        self._builds_once = builds_once
        self._had_torch = False
        self._idle: Snapshot | None = None
        """Snapshot of the generators before anything was drawn."""
        self._begun: Snapshot = ()
        """The same, of a batch whose samples are seeded."""
        self._seeded: Snapshot | None = None
        """The same, after the last seed, in a batch that is looked at. None: it isn't."""
        self._drew: set[int] = set()
        """Which generators something was drawn from, in a batch that is looked at."""
        self._drawn_from = ALL
        """Those that are seeded for each sample. The others stay as they are when a batch begins."""
        self._collate_draws = False
        """Whether the `collate_fn` draws, so that it is seeded."""
        self._samples_drew: bool | None = None
        """Whether the batch's samples have. None: it isn't known yet."""
        self._epoch: int | None = None
        """Of the last batch."""
        self._keys: list[int] = []
        self._fetching: Fetching | None = None
        """What was begun and not ended."""
        self._outer: Fetching | None = None

    def begin(self, fetching: Fetching) -> None:
        """Seed for a batch. Call `needs_rebuild` after each `begin`."""
        self._outer, self._fetching = _enter(fetching), fetching
        is_new, self._epoch = self._epoch != fetching.epoch, fetching.epoch
        self._samples_drew = None
        if self._rng is not Rng.SAMPLE:
            return
        self._had_torch = "torch" in sys.modules
        if self.by_sample:
            base = derive_key(fetching.seed, Purpose.SAMPLE.value, fetching.epoch)
            self._keys = derive_keys(base, np.array(fetching.indices, np.int64).view(np.uint64)).tolist()
            seed_generators(fetching.collate_key)  # for `__getitems__`, which gets no seed per sample
            self._begun = () if self._builds_once else snapshot_generators()
            self._seeded = self._begun if is_new and self._begun else None
            if self._seeded is not None:
                self._drew, self._drawn_from = set(), ALL
        elif self._idle is None or snapshot_generators() != self._idle:
            seed_generators(_IDLE_KEY)
            self._idle = snapshot_generators()

    def begin_sample(self, number: int) -> None:
        """Seed for the sample at this position in the batch."""
        if self._rng is Rng.SAMPLE:
            self._seed(self._keys[number])

    def _seed(self, key: int) -> None:
        self._note_draws()
        seed_generators(key, self._drawn_from)
        if self._seeded is not None:
            self._seeded = snapshot_generators()

    def _note_draws(self) -> None:
        if self._seeded is not None:
            self._drew |= _changed(self._seeded, snapshot_generators())

    def replace(self, fetching: Fetching, *indices: int) -> None:
        """Put other samples in the place of the one that is being fetched, keyed by their own indices; or none."""
        number = len(fetching.samples)
        fetching.replace(*indices)
        if self._keys:
            key = partial(derive_key, fetching.seed, Purpose.SAMPLE.value, fetching.epoch)
            self._keys[number : number + 1] = map(key, indices)

    def begin_collate(self) -> None:
        """Note whether samples have drawn, and seed for the `collate_fn`, unless it isn't known to draw."""
        fetching = self._fetching
        if self._rng is not Rng.SAMPLE or fetching is None:
            return
        if not self.by_sample:
            self._samples_drew = self._has_drawn()
        elif self._seeded is not None:
            self._note_draws()
            self._samples_drew = None if self._drew or fetching.has_generator else False
        if self.by_sample or (self._collate_draws and not self._samples_drew):
            self._seed(fetching.collate_key)

    def needs_rebuild(self) -> bool:
        """Return whether the batch must be built again, because something drew random numbers without its seed."""
        fetched, self._fetching = self._fetching, None
        if fetched is None:  # the attempt failed before anything was fetched
            return False
        _enter(self._outer)
        only_collate_may_draw = self._samples_drew is False
        if self.by_sample:
            if self._rng is not Rng.SAMPLE:
                return False
            if only_collate_may_draw:
                self.by_sample, self._collate_draws, self._seeded, self._drawn_from = False, True, None, ALL
            elif self._seeded is not None:
                self._note_draws()
                self._seeded, self._drawn_from = None, frozenset(self._drew)
            elif self._begun and _changed(self._begun, snapshot_generators()) - self._drawn_from:
                self._drawn_from = ALL
                return True
            # torch was imported while the batch was fetched, so its generator wasn't seeded.
            return not self._had_torch and "torch" in sys.modules
        has_drawn = not (only_collate_may_draw and self._collate_draws) and self._has_drawn()
        if has_drawn and only_collate_may_draw and not fetched.drew_in_bulk:
            self._collate_draws = True
            return True
        self.by_sample, self._drawn_from = has_drawn or fetched.drew_in_bulk, ALL
        return self.by_sample

    def _has_drawn(self) -> bool:
        """Return whether anything has drawn since `begin`, without a seed."""
        if self._rng is not Rng.SAMPLE or self._idle is None:
            return False
        now = snapshot_generators()
        if len(now) > len(self._idle):  # torch was imported in between; its generator may be as it began
            torch = sys.modules["torch"]
            unused = torch.Generator().manual_seed(torch.default_generator.initial_seed())
            return now != (*self._idle, _snapshot_torch(unused))
        return now != self._idle


def _changed(before: Snapshot, now: Snapshot) -> set[int]:
    """Return the places of the generators from which something was drawn in between."""
    return {place for place, (old, new) in enumerate(zip(before, now, strict=False)) if old != new}


class Fetching:
    """The batch that is being fetched, for `sample_rng`. The number of fetched samples tells which one is next."""

    __slots__ = ("_first", "_generator", "_number", "drew_in_bulk", "epoch", "in_bulk", "indices", "samples", "seed")

    def __init__(
        self, seed: int, epoch: int, indices: Sequence[int], samples: list[Any], *, in_bulk: bool = False
    ) -> None:
        self.seed = seed
        self.epoch = epoch
        self._first = indices[:1]
        """Empty if the batch is."""
        self.indices = indices
        """The batch's dataset indices; `indices[len(samples)]` is being fetched. Never changed in place."""
        self.samples = samples
        """The samples fetched so far."""
        self.in_bulk = in_bulk
        """Whether `__getitems__` fetches all samples at once, although the dataset has `__getitem__`, too."""
        self.drew_in_bulk = False
        """Whether `sample_rng` was called while all samples were fetched at once."""
        self._number = -1
        self._generator: np.random.Generator | None = None

    def generator(self) -> np.random.Generator:
        """Return the generator of the sample that is being fetched; after the last sample, the batch's generator."""
        number = len(self.samples)
        if self._generator is None or number != self._number:
            self._number = number
            self.drew_in_bulk |= self.in_bulk and number == 0
            key = derive_key(self.seed, Purpose.GENERATOR.value, self.epoch, *self._name(number))
            self._generator = np.random.Generator(np.random.Philox(key=key))
        return self._generator

    @property
    def collate_key(self) -> int:
        """Seeds the `collate_fn`."""
        return derive_key(self.seed, Purpose.COLLATE.value, self.epoch, *self._first)

    @property
    def has_generator(self) -> bool:
        """Whether `sample_rng` was called."""
        return self._generator is not None

    @property
    def index(self) -> int:
        """The dataset index of the sample that is being fetched."""
        return self.indices[len(self.samples)]

    def fetch_one_by_one(self) -> None:
        """Start again, one sample at a time."""
        self.samples.clear()
        self.in_bulk = False
        self._generator = None

    def replace(self, *indices: int) -> None:
        """Put other samples in the place of the one that is being fetched. None: the next one takes it."""
        number = len(self.samples)
        self.indices = [*self.indices[:number], *indices, *self.indices[number + 1 :]]
        self._generator = None

    def _name(self, number: int) -> tuple[int, ...]:
        if number < len(self.indices):
            return (self.indices[number],)
        return (Purpose.COLLATE.value, *self._first)


_current: Fetching | None = None
"""Global, like the generators, so that threads which the dataset starts can use it, too."""


class _OfThread(threading.local):
    """What a worker thread is fetching, in place of `_current`."""

    is_worker = False
    current: Fetching | None = None


_of_thread = _OfThread()


def keep_to_this_thread() -> None:
    """Let `sample_rng` tell this thread's samples from those of other worker threads. Call it on a worker thread."""
    _of_thread.is_worker = True


def key_this_thread(fetching: Fetching) -> None:
    """Key `sample_rng` on this thread by this sample, until the next call."""
    _of_thread.is_worker, _of_thread.current = True, fetching


def _enter(fetching: Fetching | None) -> Fetching | None:
    """Set the batch that is being fetched; return the previous one."""
    global _current
    if _of_thread.is_worker:
        outer, _of_thread.current = _of_thread.current, fetching
        return outer
    outer, _current = _current, fetching
    return outer


def sample_rng() -> np.random.Generator:
    """Return the random generator of the sample that is being fetched, for use in `__getitem__` and transforms.

    The generator is keyed by (seed, epoch, dataset index). Its numbers are the same for any number of workers and after
    a resume; they differ from epoch to epoch. A second call for the same sample returns the same generator, which
    continues its sequence. In a `collate_fn`, and in the `__getitems__` of a dataset without `__getitem__`, the
    generator is keyed by the batch's first index instead. Outside a loader, this returns a new, unseeded generator, so
    a dataset also works on its own. A call takes 15 us.
    """
    fetching = _of_thread.current if _of_thread.is_worker else _current
    return np.random.default_rng() if fetching is None else fetching.generator()


@contextmanager
def watched_draws() -> Iterator[Fetching]:
    """Have `sample_rng` key this thread by a sample of its own, whose `drew_in_bulk` tells whether it was called."""
    outer = _of_thread.is_worker, _of_thread.current
    fetching = Fetching(0, 0, [0], [], in_bulk=True)
    try:
        key_this_thread(fetching)
        yield fetching
    finally:
        _of_thread.is_worker, _of_thread.current = outer


def fetched_without_draws(fetch: Callable[[], Any]) -> tuple[Any, bool, bool]:
    """Return a sample, whether fetching it asked for `sample_rng()`, and whether the generators moved meanwhile.

    Threads share the global generators, so on a worker thread these aren't watched, and any other thread may move them.
    """
    before = None if _of_thread.is_worker else snapshot_generators()
    with watched_draws() as fetching:
        sample = fetch()
    moved = before is not None and snapshot_generators()[: len(before)] != before
    return sample, fetching.drew_in_bulk, moved


def seed_for_construction(rng: Rng) -> None:
    """Seed for the dataset's constructor. The seed is constant: each worker, rank and run draws the same numbers."""
    if rng is not Rng.NONE:
        seed_generators(_CONSTRUCTION_KEY)


def seed_for_worker(seed: int, rank: int, worker: int, rng: Rng) -> None:
    """Seed a worker before its first task, if `rng` is `Rng.WORKER`. There is no other seeding then."""
    if rng is Rng.WORKER:
        seed_generators(derive_key(seed, Purpose.WORKER.value, rank, worker))
