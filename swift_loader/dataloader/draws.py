"""Draws the indices of an epoch from a loader's sampler, as torch does, and remembers how to draw them again.

Samplers draw from a `torch.Generator` of their own, from torch's default generator, from `random` or from the legacy
`numpy.random`. A sampler without a `state_dict`, or with one that stays the same in an epoch, is resumed by drawing
again from the same states. All of this runs on the loop's thread, as the sampler is the user's code.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from swift_loader.batch.digests import difference
from swift_loader.batch.tree import search
from swift_loader.dataloader.options import GENERATOR_KINDS
from swift_loader.dataloader.state import (
    DrawsState,
    SamplerState,
    pack_generator,
    pack_states,
    set_generator,
    set_states,
    unpack_states,
)
from swift_loader.errors import StateMismatch
from swift_loader.samplers.base import ResumableSampler, chain_of
from swift_loader.sampling.integers import MAX_BITS, field_of, integer
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.transport.task import IndexArray
from swift_loader.worker.torch_worker import epoch_of, is_stateful

_NOTHING = object()


class Drawn(NamedTuple):
    """What a batch is made of."""

    step: int
    """Which batch of the epoch, from 0."""
    indices: Any
    """A list or an `IndexArray` of indices; a single one with `batch_size=None`."""
    sampler_state: SamplerState | None
    """States of the sampler and its iterator after the draw. None if neither has a `state_dict`."""

    @property
    def keys(self) -> Any:
        """The indices as torch's fetchers take them."""
        return self.indices.to_list() if isinstance(self.indices, IndexArray) else self.indices


class Draws:
    """The draws of one epoch."""

    def __init__(
        self, loader: DataLoader[Any], epoch: int, state: DrawsState | None, base_seed: int | None = None
    ) -> None:
        """Begin an epoch, or continue one.

        Draws the base seed where torch draws it, so the generators are used in the same order. `epoch`: of this loader,
        from 0. `base_seed`: that of an earlier epoch, if workers keep it; None: draw it. With a seed, each epoch
        draws it, so `persistent_workers` changes none.
        """
        self.seed: int | None = getattr(loader, "_order_seed", None)
        """The user's seed, or a loaded state's. None: the generators determine all."""
        base_seed = base_seed if self.seed is None else None
        self._state_at_first: torch.Tensor | None = None
        """With a seed, the generator's state at the first draw, since another iterator may have seeded it meanwhile."""
        self._dataset, self._generator = loader.dataset, loader.generator  # not the loader: it refers to its epoch
        self._source, self._has_batches = LoaderSampler(loader), loader._auto_collation  # noqa: SLF001
        self._own = self._source.generators
        self._sampler_epochs: list[int] | None = None
        """Known once something is drawn, since frameworks call `set_epoch` between `iter` and the first batch."""
        self._used: States = {}
        """What the global generators were when the epoch began, of those that the sampler has drawn from."""
        self._untold: tuple[States, States] | None = None
        """The global generators when the epoch began and before the first draw, until that tells which ones matter."""
        self._epochs_now: list[int] | None = None
        """The epochs of the samplers after the last draw. None: nothing drawn."""
        self._replayed: States = {}
        """The global generators where drawing again has left them. The rest of the epoch is drawn from there."""
        self._iterator: Iterator[Any] = iter(())
        self._start: SamplerState | None = None
        """The state of the sampler when the epoch began. None: it has none, or this continues at a later one, or it is
        one of ours, whose state tells the place."""
        self._draws_again = state is not None and state.draws_again and state.num_drawn > 1
        """Whether the sampler's state doesn't tell the place in the epoch. That shows only in the second draw: the
        first one may have counted the epoch."""
        self.num_drawn = self._num_here = 0
        """Of the epoch; and by this object, which doesn't count those that are drawn again."""
        if state is not None and len(state.generators) == len(self._own):
            for generator, packed in zip(self._own, state.generators, strict=True):
                set_generator(generator, packed)
        if state is not None and not state.begins_epoch:
            self.begun = state
            """Where it began, or where it continues."""
            self._continue(state)
            return
        if state is not None:
            epoch = state.next_epoch
            if state.of_sampler is not None and (state.draws_again or not state.is_over):
                self._source.sampler.load_state_dict(state.of_sampler)
            elif state.sampler_state is not None:
                self._source.iterate(state.sampler_state)
        self.begun = self._begin(epoch, base_seed, has_workers=bool(loader.num_workers))

    def _begin(self, epoch: int, base_seed: int | None, *, has_workers: bool) -> DrawsState:
        """Begin afresh, with the same draws as torch. Return where that is."""
        if self.seed is not None:
            self._generator.manual_seed(derive_key(self.seed, Purpose.GENERATOR.value, epoch))
        own, draws_seed = self._source.pack_generators(), base_seed is None
        before = states_of(_GLOBAL_GENERATORS) if self._source.may_draw else None
        if not isinstance(self._source.sampler, ResumableSampler):
            self._start = self._source.state_of_sampler()
        self._iterator = self._source.iterate()
        of_sampler, _ = self._source.state_of_sampler() or (None, None)
        if before is not None:
            self._used = {name: before[name] for name in _changed_since(before)}
        base_seed = self._draw_base_seed() if base_seed is None else base_seed
        if begins_twice := has_workers and draws_seed and not self._source.is_stateful:
            self._iterator = self._source.iterate()  # as torch: a sampler may draw when it is iterated
        if self.seed is not None:
            self._state_at_first = self._generator.get_state()
        if before is not None:
            self._untold = before, states_of(_GLOBAL_GENERATORS)
        return DrawsState(
            base_seed, epoch, 0, of_sampler, generators=own, draws_seed=draws_seed, begins_twice=begins_twice
        )

    def _draw_base_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())

    def _continue(self, state: DrawsState) -> None:
        """Draw again what was drawn. The global generators stay as they are."""
        self._used = unpack_states(state.global_states)
        self.num_drawn = state.num_drawn
        self._sampler_epochs = state.sampler_epochs if state.num_drawn else None
        if not state.is_begun:
            self._untold = self._used, self._used
        self._start = state.sampler_state if state.draws_again else None
        if self._source.epochs and (state.sampler_state is None or (state.draws_again and state.is_begun)):
            self._iterator = self._draw_again_later(state)
        else:
            self._iterator = self._draw_again(state)

    def _draw_again_later(self, state: DrawsState) -> Iterator[Any]:
        """Draw again when the first batch is asked for: Lightning calls `set_epoch` after `iter`."""
        yield from self._draw_again(state, draws_first=True)

    def _draw_again(self, state: DrawsState, *, draws_first: bool = False) -> Iterator[Any]:
        """Return an iterator over what is left to draw. `draws_first`: it is asked for the first of it at once."""
        counts = (state.sampler_state is None or state.draws_again) and not self._source.is_stream
        num_again = state.num_drawn if counts else 0
        first = _NOTHING
        epochs = state.sampler_epochs if num_again and state.of_sampler is None else None  # else its state has it
        with _applied(self._used), self._source.at_epochs(epochs):
            iterator = self._source.iterate(state.sampler_state, state.sampler_epochs)
            if state.draws_seed and (self._generator is not None or "torch" in self._used):
                self._draw_base_seed()  # else nobody draws from its generator again
            if state.begins_twice:
                iterator = self._source.iterate(state.sampler_state)
            for _ in range(num_again):
                next(iterator, None)
            if counts and (state.is_begun or draws_first):  # as samplers of torch draw a seed for the first index
                first = next(iterator, _NOTHING)
            self._replayed = states_of(self._used)
        return iterator if first is _NOTHING else chain((first,), iterator)

    def next(self) -> Drawn | None:
        """Return the next draw; None at the end. What the sampler raises, this raises."""
        if self._replayed:
            return self._next_replayed()
        if self._sampler_epochs is None:
            self._sampler_epochs = self._source.epochs
        if self._state_at_first is not None:
            self._generator.set_state(self._state_at_first)
            self._state_at_first = None
        indices: Any = next(self._iterator, _NOTHING)  # not by `for`, which would call `__iter__` again
        self._epochs_now = self._source.epochs  # Accelerate's sampler counts its epochs itself
        if self._untold is not None and indices is not _NOTHING:
            began, seeded = self._untold
            used = {name: began[name] for name in _changed_since(seeded)} | self._used
            self._used, self._untold = used, None  # no handler runs within this line
        if indices is _NOTHING:
            return None
        is_list = type(indices) is IndexArray or hasattr(indices, "__len__")
        if self._has_batches and not is_list:  # `map`, `islice` or a generator
            indices = list(indices)
        drawn = Drawn(self.num_drawn, indices, self._source.state())
        self._draws_again = self._draws_again or (self._start is not None and self._source.has_stayed)
        self.num_drawn += 1
        self._num_here += 1
        return drawn

    def _next_replayed(self) -> Drawn | None:
        replayed, self._replayed = self._replayed, {}
        if not _changed_since(replayed):  # the program has restored its generators
            return self.next()
        try:
            with _applied(replayed):
                drawn = self.next()
                self._replayed = states_of(replayed)
        except BaseException:
            self._replayed = self._replayed or replayed  # the next draw continues there
            raise
        return drawn

    @property
    def is_stale(self) -> bool:
        """Whether `set_epoch` was called since something was drawn."""
        return self._epochs_now is not None and self._epochs_now != self._source.epochs

    def state_at(self, num_drawn: int, sampler_state: SamplerState | None, *, is_over: bool) -> DrawsState:
        """Return how to continue after so many draws.

        `num_drawn`: batches that the loop got. `sampler_state`: as in the last one's `Drawn`. `is_over`: the loop has
        met the end of the epoch.
        """
        is_known = self._draws_again or self._num_here > 1
        draws_again = self._draws_again if is_known else self._start is not None
        if draws_again:  # as a sampler counts its epochs when one begins, or when it ends
            sampler_state = self._source.state_of_sampler() if is_over else self._start
        elif not num_drawn and sampler_state is None:
            sampler_state = self.begun.sampler_state
        of_sampler, of_iterator = sampler_state or (None, None)
        used = self._used if self._untold is None else self._untold[0]
        return replace(
            self.begun,
            num_drawn=num_drawn,
            of_sampler=of_sampler,
            of_iterator=of_iterator,
            generators=self._source.pack_generators() if is_over else self.begun.generators,
            global_states={} if is_over or not (sampler_state is None or draws_again) else pack_states(used),
            draws_again=draws_again,
            is_begun=self._untold is None,
            sampler_epochs=self._source.epochs if self._sampler_epochs is None else self._sampler_epochs,
            dataset_epoch=epoch_of(self._dataset),
            is_over=is_over,
        )


def before_first(loader: DataLoader[Any]) -> DrawsState:
    """Return how to draw the first epoch of a loader that has begun none."""
    source = LoaderSampler(loader)
    of_sampler, _ = source.state_of_sampler() or (None, None)
    epochs, own, of_dataset = source.epochs, source.pack_generators(), epoch_of(loader.dataset)
    return DrawsState(None, 0, of_sampler=of_sampler, generators=own, sampler_epochs=epochs, dataset_epoch=of_dataset)


# The global generators ------------------------------------------------------------------------------------------

States = dict[str, Any]
"""States of global generators, by name."""

_GLOBAL_GENERATORS: dict[str, Any] = {"torch": torch.default_generator, "python": random, "numpy": np.random}
"""What has the state of each."""


def states_of(names: Iterable[str]) -> States:
    """Return the present states of these global generators."""
    return {name: random.getstate() if name == "python" else _GLOBAL_GENERATORS[name].get_state() for name in names}


def _changed_since(before: States) -> list[str]:
    """Return the generators among these that have been drawn from since."""
    return [name for name, state in states_of(before).items() if difference(state, before[name]) is not None]


@contextmanager
def _applied(states: States) -> Iterator[None]:
    """Set the generators to these states, and afterwards to those that they had before."""
    before = states_of(states)
    try:
        set_states(_GLOBAL_GENERATORS, states)
        yield
    finally:
        set_states(_GLOBAL_GENERATORS, before)


# A loader's sampler: an iterator over the indices of each batch, its state, and the epochs that `set_epoch` sets ------


_GLOBAL: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)  # noqa: SLF001
"""Those of the modules, which a sampler may refer to, as scikit-learn's functions do."""

_MAX_ITEMS = 64
"""Longer containers hold indices or data."""


def _holds_data(thing: Any, dataset: Any) -> bool:
    """Return whether a part of a sampler isn't looked into for generators."""
    is_long = type(thing) in {list, tuple, dict, set} and len(thing) > _MAX_ITEMS
    return is_long or thing is dataset or issubclass(type(thing), (Dataset, torch.nn.Module))


class LoaderSampler:
    """A loader's sampler. Looks through torch's own `BatchSampler`, which has no state."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.sampler: Any = loader._index_sampler  # noqa: SLF001 - a subclass's may be another one
        self._batches = self.sampler if loader._auto_collation and type(self.sampler) is BatchSampler else None  # noqa: SLF001
        if self._batches is not None:
            self.sampler = self._batches.sampler
        self.is_stateful = is_stateful(self.sampler)
        self.samplers = chain_of(loader.sampler, loader.batch_sampler, self.sampler)
        """All samplers that take part, outermost first."""
        named = (getattr(owner, "generator", None) for owner in (loader, *self.samplers))
        found = [one for one in named if isinstance(one, torch.Generator)]
        if not self.is_stateful:  # else its state has what it draws from
            users = [one for one in self.samplers if not type(one).__module__.startswith(("torch.utils.", _OURS))]
            found += search(users, lambda thing: type(thing) in GENERATOR_KINDS or _holds_data(thing, loader.dataset))
            found = [one for one in found if type(one) in GENERATOR_KINDS and one not in _GLOBAL]  # no SystemRandom
        self.generators = list({id(one): one for one in found}.values())
        """What the loader and the samplers draw from, each once."""
        self._settable = [sampler for sampler in self.samplers if hasattr(sampler, "set_epoch")]
        self._iterator: Any = None
        self._iterator_state: Any = None
        """What the iterator is to load when it is made."""
        self._last_state: SamplerState | None = None
        self.has_stayed = False
        """Whether a draw has left all states as they were. Then they don't tell the place."""
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        draws_nothing = type(self.sampler) is SequentialSampler or isinstance(self.sampler, ResumableSampler)
        self.may_draw = not (self.is_stream or draws_nothing)
        """Whether iterating may draw from the global generators."""

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
        arrays = None if self.is_stateful else batched_arrays(self.sampler, self._batches)
        return self._batched(self._batches) if arrays is None else arrays

    def _begin_iterator(self) -> Iterator[Any]:
        self._iterator, self._last_state = iter(self.sampler), self.state_of_sampler()
        self._saves_iterator = is_stateful(self._iterator)
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

    def pack_generators(self) -> list[str]:
        """Return the present states of the generators of the loader and the samplers."""
        return [*map(pack_generator, self.generators)]

    def state_of_sampler(self) -> SamplerState | None:
        """Return a copy of the present state of the sampler alone; None if it has none."""
        if not self.is_stateful:
            return None
        state = self.sampler.state_dict()  # what one of ours returns doesn't change, and may name 100,000 rows
        return (state if isinstance(self.sampler, ResumableSampler) else deepcopy(state)), None

    def state(self) -> SamplerState | None:
        """Return copies of the present states of the sampler and its iterator; None if neither has one."""
        if self._iterator is None or not (self.is_stateful or self._saves_iterator):  # of torch's own samplers
            return None
        state = self.state_of_sampler()
        if self._iterator is not self.sampler and self._saves_iterator:
            state = None if state is None else state[0], deepcopy(self._iterator.state_dict())
        self.has_stayed = self.has_stayed or (state is not None and difference(state, self._last_state) is None)
        self._last_state = state
        return state

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


# Whether a loader draws the rest of an epoch in the same order as the one that saved the state -----------------------

_SEED = integer(0, 2**MAX_BITS - 1).or_none()
_TORCH_DRAWS = frozenset({RandomSampler, SubsetRandomSampler, WeightedRandomSampler})
"""Exact types: they have their generators from the beginning."""


def take_order(loader: Any, state: DrawsState, batching: Any) -> None:
    """Let a loader continue in the order of a state, with its seed if the user gave none.

    `batching`: the facts that were saved with the state. Earlier versions saved no seed. What an earlier state brought
    is gone. Raises `StateMismatch` if the user gave another seed, or if the rest of the epoch would come in another
    order. Then nothing has changed.
    """
    given, source = loader.seed, LoaderSampler(loader)
    seed = field_of({"batching": batching}, "batching.seed", _SEED._replace(older=given))
    if given not in (None, seed) and not (seed is None and state.begins_epoch):
        raise StateMismatch(f"the state was saved with seed={seed}, but this loader has seed={given}; give seed={seed}")
    brought = loader._brought  # noqa: SLF001
    own = None if loader.generator is brought else loader.generator
    brings = seed is not None and own is None
    before, here = len(state.generators), len({*source.generators} - {brought}) + brings
    is_drawn_again = state.num_drawn and not state.is_over and type(source.sampler) in _TORCH_DRAWS
    if is_drawn_again and before != here:  # other samplers may make their generators when they are iterated over
        raise StateMismatch(
            f"the order of the state's epoch came from {before} generators of the loader and its samplers, but these "
            f"have {here} here; give the seed= or generator= that it was saved with"
        )
    loader._order_seed = given if seed is None else seed  # noqa: SLF001
    loader._brought = new = torch.Generator() if brings else None  # noqa: SLF001
    loader.generator = own or new
    for sampler in source.samplers:
        if type(sampler) is RandomSampler and sampler.generator in {None, brought}:
            sampler.generator = None if state.is_begun and state.global_states else new  # it drew from these


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
    sampler: Any = loader._index_sampler  # noqa: SLF001
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
