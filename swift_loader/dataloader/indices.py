"""A loader's sampler: an iterator over the indices of each batch, its state, and the epochs that `set_epoch` sets.

A sampler is the user's code, so all of this runs on the loop's thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from swift_loader.transport.task import IndexArray
from swift_loader.worker.stream import is_stateful

SamplerState = tuple[Any, Any]
"""The states of a sampler and of its iterator. None: this one has none."""


class SamplerSource:
    """A loader's sampler. Looks through torch's own `BatchSampler`, which has no state."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches = loader.batch_sampler
        self._batches = batches if type(batches) is BatchSampler else None
        self.sampler: Any = loader.sampler if batches is None else batches
        if self._batches is not None:
            self.sampler = self._batches.sampler
        self.samplers = _with_inner(loader.sampler, loader.batch_sampler)
        """All samplers that take part, outermost first."""
        self._settable = [sampler for sampler in self.samplers if hasattr(sampler, "set_epoch")]
        self._iterator: Any = None
        self._iterator_state: Any = None
        """What the iterator is to load when it is made."""
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        draws_nothing = self.is_stream or type(self.sampler) is SequentialSampler
        self.may_draw = not (draws_nothing or is_stateful(self.sampler))
        """Whether iterating may draw from the global generators, and nothing else tells how to repeat that."""

    def iterate(self, state: SamplerState | None = None, epochs: Sequence[int] = ()) -> Iterator[Any]:
        """Return an iterator over the indices of the batches, from their beginning or from a state.

        A sampler inside torch's `BatchSampler` is asked for an iterator by the first draw, as with torch. `epochs`:
        those of the samplers when the state was taken. A sampler whose state is the end of an epoch may take it for the
        beginning of the next one, but the rest of this epoch is asked for.
        """
        of_sampler, self._iterator_state = (None, None) if state is None else state
        if of_sampler is not None:
            self.sampler.load_state_dict(of_sampler)
            having = [sampler for sampler in self.samplers if epoch_of(sampler) is not None]
            for sampler, epoch in zip(having, epochs, strict=False):
                if sampler is self.sampler and epoch_of(sampler) != epoch:
                    sampler.set_epoch(epoch)
        if self._batches is None:
            return self._begin_iterator()
        arrays = None if is_stateful(self.sampler) else batched_arrays(self.sampler, self._batches)
        return self._batched(self._batches) if arrays is None else arrays

    def _begin_iterator(self) -> Iterator[Any]:
        self._iterator = iter(self.sampler)
        if self._iterator_state is not None:
            self._iterator.load_state_dict(self._iterator_state)
            self._iterator_state = None
        return self._iterator  # type: ignore[no-any-return]

    def _batched(self, batches: BatchSampler) -> Iterator[list[Any]]:
        """Yield what torch's `BatchSampler` yields for the sampler's indices."""
        indices, first_size, drop_last = self._begin_iterator(), batches.batch_size, batches.drop_last
        while batch := list(islice(indices, first_size if drop_last else batches.batch_size)):
            if len(batch) < first_size and drop_last:
                return
            yield batch

    def state_of_sampler(self) -> SamplerState | None:
        """Return a copy of the present state of the sampler alone; None if it has none."""
        return (deepcopy(self.sampler.state_dict()), None) if is_stateful(self.sampler) else None

    def state(self) -> SamplerState | None:
        """Return copies of the present states of the sampler and its iterator; None if neither has one."""
        if self._iterator is None:  # of torch's own samplers
            return None
        of_sampler = self.state_of_sampler()
        if self._iterator is self.sampler or not is_stateful(self._iterator):
            return of_sampler
        return None if of_sampler is None else of_sampler[0], deepcopy(self._iterator.state_dict())

    @property
    def epochs(self) -> list[int]:
        """What `set_epoch` has set on those samplers that have an epoch, outermost first."""
        return [epoch for epoch in map(epoch_of, self._settable) if epoch is not None] if self._settable else []

    @contextmanager
    def at_epochs(self, epochs: list[int] | None) -> Iterator[None]:
        """Set the samplers to these epochs, and afterwards to those that they had before. None: leave them."""
        before = self.epochs
        if epochs is None or len(epochs) != len(before) or epochs == before:
            yield
            return
        having = [sampler for sampler in self.samplers if epoch_of(sampler) is not None]
        try:
            for sampler, epoch in zip(having, epochs, strict=True):
                sampler.set_epoch(epoch)
            yield
        finally:
            for sampler, epoch in zip(having, before, strict=True):
                sampler.set_epoch(epoch)


_MAX_CHAIN = 16
"""A property that makes a new sampler each time would make an endless chain."""


def _with_inner(*samplers: Any) -> list[Any]:
    """Return samplers, and those that they draw from, as torch's, Lightning's, Accelerate's and timm's name them."""
    left, found = [one for one in reversed(samplers) if one is not None], dict[int, Any]()
    while left and len(found) < _MAX_CHAIN:
        sampler = left.pop()
        if id(sampler) not in found:
            found[id(sampler)] = sampler
            inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
            left += [one for one in inner if one is not None]
    return list(found.values())


def epoch_of(thing: Any) -> int | None:
    """Return the epoch of a sampler or dataset. None if `set_epoch` doesn't set one.

    A shuffled order depends on it. After a restart, Fabric and Accelerate count epochs from 0 again, and a Lightning
    Trainer calls `set_epoch` after `iter`, so a state keeps the epochs of what it describes.
    """
    epoch = getattr(thing, "epoch", None) if hasattr(thing, "set_epoch") else None
    return epoch if isinstance(epoch, int) else None


# How many batches may be drawn earlier than torch draws them ----------------------------------------------------------

_DRAW_AT_ONCE = frozenset({SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler, range})
"""They draw all their numbers for the first index. Exact types: a class derived from one may do anything."""

_OURS = "swift_loader.samplers."
"""Where our samplers are defined. They leave all generators as they were."""


def num_early_draws(loader: DataLoader[Any]) -> float:
    """Return how many batches of an epoch nobody notices the draws of; infinite for all.

    torch draws `prefetch_factor` batches per worker when an epoch begins, and one more with each batch that the loop
    gets. A program notices draws that come earlier if the sampler draws from a generator that the loop uses, too, or if
    it looks at what the loop changes.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) in _DRAW_AT_ONCE or type(sampler).__module__.startswith(_OURS):
        return math.inf
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples <= len(sampler.data_source):
        # At its end it draws once more, which shows if the generator is the user's.
        return math.inf if sampler.generator is None else len(loader) - 1
    return 0


# torch's own samplers, as arrays: in a list, each index would be an object --------------------------------------------

_RUN = 1 << 16
"""How many consecutive indices are made at a time."""


def batched_arrays(sampler: Any, batches: BatchSampler) -> Iterator[IndexArray] | None:
    """Return the batches that torch's `BatchSampler` makes of this sampler's indices.

    Without `drop_last`, their size may change from batch to batch. The generators are used as by torch's samplers: the
    same draws, in the same order, each as late. None: it isn't a sampler of torch's that is known here. A subclass of
    them is the user's.
    """
    if type(sampler) is SequentialSampler:
        runs = _consecutive(sampler)
    elif type(sampler) is RandomSampler and not sampler.replacement:
        runs = _permuted(sampler)
    else:
        return None
    return _cut(runs, batches)


def _consecutive(sampler: SequentialSampler) -> Iterator[NDArray[np.int64]]:
    length = len(sampler.data_source)
    for start in range(0, length, _RUN):
        yield np.arange(start, min(start + _RUN, length), dtype=np.int64)


def _permuted(sampler: RandomSampler) -> Iterator[NDArray[np.int64]]:
    """Yield permutations, each drawn when its first index is asked for; the last one even if it is cut to nothing.

    Its length is known when it is drawn, as torch's: a dataset may have grown by then.
    """
    length, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // length):
        yield torch.randperm(length, generator=generator).numpy(force=True)
    yield torch.randperm(length, generator=generator).numpy(force=True)[: sampler.num_samples % length]


def _cut(runs: Iterator[NDArray[np.int64]], batches: BatchSampler) -> Iterator[IndexArray]:
    """Yield batches of indices. A run is asked for when an index of it is needed."""
    left, first_size, drop_last = np.empty(0, np.int64), batches.batch_size, batches.drop_last
    for run in runs:
        left = np.concatenate((left, run)) if len(left) else run
        while len(left) >= (size := first_size if drop_last else batches.batch_size):
            yield IndexArray(left[:size])
            left = left[size:]
    if len(left) and not drop_last:
        yield IndexArray(left)
