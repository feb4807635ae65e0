"""Draws the indices of an epoch from a loader's sampler, as torch does, and remembers how to draw them again.

Runs on the loop's thread, as the sampler is the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from swift_loader.dataloader.datapipes import draw_pipe_seed, is_seeded_pipe
from swift_loader.dataloader.epochs import at_epochs, epoch_of, epochs_of, with_inner
from swift_loader.dataloader.generators import (
    NO_STATES,
    GlobalStates,
    Substitute,
    generators_of,
    pack_generators,
    unpack_generators,
)
from swift_loader.dataloader.index_arrays import batched_arrays
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.transport.task import IndexArray
from swift_loader.worker.stream_state import is_stateful

_NOTHING = object()


class Drawn(NamedTuple):
    """What a batch is made of."""

    step: int
    """Which batch of the epoch, from 0."""
    indices: Any
    """A list or an `IndexArray` of indices; a single one with `batch_size=None`."""
    sampler_state: tuple[Any, Any] | None
    """States of the sampler and its iterator after the draw. None if neither has a `state_dict`."""

    @property
    def keys(self) -> Any:
        """The indices as torch's fetchers take them."""
        return self.indices.to_list() if isinstance(self.indices, IndexArray) else self.indices


@dataclass(frozen=True, slots=True)
class DrawsState:
    """How to draw the rest of an epoch again."""

    base_seed: int
    epoch: int
    num_drawn: int
    sampler_state: tuple[Any, Any] | None
    generators: list[str]
    """States of the samplers' own generators: when the epoch began; at its end if the epoch is over."""
    global_states: dict[str, Any]
    """States of the global generators when the epoch began, of those that the sampler has drawn from."""
    present_states: dict[str, Any]
    """The same generators, and the one that gives the base seeds, when the state was taken."""
    is_begun: bool
    """Whether the first index was asked for. Samplers of torch draw a seed then."""
    draws_seed: bool
    """Whether the base seed was drawn when the epoch began."""
    begins_twice: bool
    """Whether the sampler was iterated twice when the epoch began, as torch does with new workers."""
    sampler_epochs: list[int]
    """What `set_epoch` had set on the samplers when this epoch was drawn, outermost first."""
    dataset_epoch: int | None
    """What `set_epoch` has set on the dataset. None: it has no epoch."""
    is_over: bool
    """Whether the epoch is over, so that the next one begins."""


class Draws:
    """The draws of one epoch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        epoch: int,
        state: DrawsState | None,
        substitute: Substitute,
        *,
        base_seed: int | None = None,
    ) -> None:
        """Begin an epoch, or continue one.

        Draws the base seed where torch draws it, so the generators are used in the same order. `epoch`: of this loader,
        from 0. `substitute`: the loader's. It stands for the global generators once a state was loaded. `base_seed`:
        that of an earlier epoch, if workers keep it; None: draw it.
        """
        self._seed: int | None = getattr(loader, "_order_seed", None)
        self._state_at_first: torch.Tensor | None = None
        """With a seed, that of the generator at the first draw, since another iterator may have seeded it meanwhile."""
        self._dataset, self._generator = loader.dataset, loader.generator  # not the loader: it refers to its epoch
        self._substitute = substitute
        self._source = _SamplerSource(loader)
        self._own = generators_of(loader, *self._source.samplers)
        self._own_at_begin: list[str] = []
        self._sampler_epochs: list[int] | None = None
        """Known once something is drawn, since frameworks call `set_epoch` between `iter` and the first batch."""
        self._used = NO_STATES
        """What the global generators were when the epoch began, of those that the sampler has drawn from."""
        self._untold: tuple[GlobalStates, GlobalStates] | None = None
        """The global generators when the epoch began and before the first draw, until that tells which ones matter."""
        self._epochs_now: list[int] | None = None
        """The epochs of the samplers after the last draw. None: nothing drawn."""
        self._replayed: GlobalStates | None = None
        """The global generators where drawing again has left them. The rest of the epoch is drawn from there."""
        self._iterator: Iterator[Any] = iter(())
        self.num_drawn = 0
        self.epoch = epoch
        self.pipe_seed: int | None = None
        """The seed of a DataPipe's shuffles; None for other datasets."""
        self._state_at_begin: tuple[Any, Any] | None = None
        """Of a sampler with a state, when the epoch began."""
        self._draws_seed = base_seed is None
        self.base_seed = 0 if base_seed is None else base_seed
        self._begins_twice = bool(loader.num_workers) and self._draws_seed and not is_stateful(self._source.sampler)
        if state is not None:
            substitute.load(GlobalStates.unpack(state.present_states))
        if state is not None and state.is_over:
            self._pass_end(state)
            state = None
        if state is None:
            with substitute.applied():
                self._begin()
        else:
            self._continue(state)

    def _begin(self) -> None:
        """Begin afresh, with the same draws as torch."""
        if self._seed is not None:
            self._generator.manual_seed(derive_key(self._seed, Purpose.GENERATOR.value, self.epoch))
        self._own_at_begin = pack_generators(self._own)
        before = GlobalStates.of_all() if self._source.may_draw else None
        self.pipe_seed = draw_pipe_seed(self._dataset, self._generator)
        self._iterator = self._source.iterate()
        self._state_at_begin = self._source.state_of_sampler()
        if before is not None:
            self._used = before.where_changed(before, GlobalStates.of_all())
        if self._draws_seed:
            self.base_seed = self._draw_base_seed()
        if self._begins_twice:
            self._iterator = self._begin_again()
        if self._seed is not None:
            self._state_at_first = self._generator.get_state()
        if before is not None:
            self._untold = before, GlobalStates.of_all()

    def _begin_again(self, state: DrawsState | None = None) -> Iterator[Any]:
        """Do what torch does once more when it has started workers. A sampler may draw when it is iterated."""
        draw_pipe_seed(self._dataset, self._generator)  # for nothing: the workers have the first one
        return self._source.iterate() if state is None else self._source.iterate(state.sampler_state)

    def _draw_base_seed(self) -> int:
        seed = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return int(seed.item())

    def _continue(self, state: DrawsState) -> None:
        """Draw again what was drawn. The global generators stay as they are."""
        self.epoch, self.base_seed, self._draws_seed = state.epoch, state.base_seed, state.draws_seed
        self._begins_twice = state.begins_twice
        self._own_at_begin = state.generators
        self._load_own(state)
        self._used = GlobalStates.unpack(state.global_states)
        self.num_drawn = state.num_drawn
        self._sampler_epochs = state.sampler_epochs if state.num_drawn else None
        if not state.is_begun:
            self._untold = self._used, self._used
        if epochs_of(self._source.with_epochs) and state.sampler_state is None:
            self._iterator = self._draw_again_later(state)
        else:
            self._iterator = self._draw_again(state)

    def _draw_again_later(self, state: DrawsState) -> Iterator[Any]:
        """Draw again when the first batch is asked for: Lightning calls `set_epoch` after `iter`."""
        yield from self._draw_again(state)

    def _draw_again(self, state: DrawsState) -> Iterator[Any]:
        """Return an iterator over what is left to draw."""
        counts = state.sampler_state is None and not self._source.is_stream
        num_again = state.num_drawn if counts else 0
        epochs = state.sampler_epochs if num_again else None
        first = _NOTHING
        with self._used.applied(), at_epochs(self._source.samplers, epochs):
            self.pipe_seed = draw_pipe_seed(self._dataset, self._generator)
            iterator = self._source.iterate(state.sampler_state, state.sampler_epochs)
            if state.draws_seed and (self._generator is not None or self._used.torch_state is not None):
                self._draw_base_seed()  # else nobody draws from its generator again
            if state.begins_twice:
                iterator = self._begin_again(state)
            for _ in range(num_again):
                next(iterator, None)
            before = self._used.now()
            if counts and state.is_begun:  # here, because samplers of torch draw a seed for the first index
                first = next(iterator, _NOTHING)
            self._replayed = self._used.now()
        if num_again:
            self._substitute.advance(self._replayed.where_changed(before, self._replayed))
        return iterator if first is _NOTHING else chain((first,), iterator)

    def _load_own(self, state: DrawsState) -> None:
        """Set the samplers' own generators to their saved states."""
        if len(state.generators) == len(self._own):
            unpack_generators(self._own, state.generators)

    def _pass_end(self, state: DrawsState) -> None:
        """Leave the sampler as it was at the end of an epoch."""
        self.epoch = state.epoch + 1
        self._load_own(state)
        if state.sampler_state is not None:
            self._source.iterate(state.sampler_state)

    def next(self) -> Drawn | None:
        """Return the next draw; None at the end. What the sampler raises, this raises."""
        if self._replayed is None and self._substitute.is_empty:  # nearly always
            return self._next()
        if not self._source.may_draw and self._untold is None:
            return self._next()
        if self._replayed is None:
            with self._substitute.applied():
                return self._next()
        before = self._replayed
        with before.applied():
            drawn = self._next()
            self._replayed = before.now()
        # A sampler that draws while it goes on has moved the generators by as much as in the run that was saved.
        self._substitute.advance(self._replayed.where_changed(before, self._replayed))
        return drawn

    def _next(self) -> Drawn | None:
        if self._sampler_epochs is None:
            self._sampler_epochs = epochs_of(self._source.with_epochs)
        if self._state_at_first is not None:
            self._generator.set_state(self._state_at_first)
            self._state_at_first = None
        indices = next(self._iterator, _NOTHING)  # not by `for`, which would call `__iter__` again
        self._epochs_now = epochs_of(self._source.with_epochs)  # Accelerate's sampler counts its epochs itself
        if indices is _NOTHING:
            return None
        if self._untold is not None:
            (began, seeded), self._untold = self._untold, None
            self._used = self._used.merged(began.where_changed(seeded, GlobalStates.of_all()))
        drawn = Drawn(self.num_drawn, indices, self._source.state())
        self.num_drawn += 1
        return drawn

    @property
    def is_stale(self) -> bool:
        """Whether `set_epoch` was called since something was drawn."""
        return self._epochs_now is not None and self._epochs_now != epochs_of(self._source.with_epochs)

    def state_at(self, num_drawn: int, sampler_state: tuple[Any, Any] | None, *, is_over: bool) -> DrawsState:
        """Return how to continue after so many draws.

        `num_drawn`: batches that the loop got. `sampler_state`: as in the last one's `Drawn`. `is_over`: the loop has
        met the end of the epoch.
        """
        own = pack_generators(self._own) if is_over else self._own_at_begin
        used = self._used if self._untold is None else self._untold[0]
        if not num_drawn and sampler_state is None:
            sampler_state = self._state_at_begin
        epochs = epochs_of(self._source.with_epochs) if self._sampler_epochs is None else self._sampler_epochs
        at_begin = {} if is_over or sampler_state is not None else used.pack()
        present = self._substitute.present()
        relevant = present.only(used)
        if self._draws_seed and self._generator is None:  # the next epochs' base seeds come from there
            relevant = relevant.merged(GlobalStates(present.torch_state, None, None))
        return DrawsState(
            base_seed=self.base_seed,
            epoch=self.epoch,
            num_drawn=num_drawn,
            sampler_state=sampler_state,
            generators=own,
            global_states=at_begin,
            present_states=relevant.pack(),
            is_begun=self._untold is None,
            draws_seed=self._draws_seed,
            begins_twice=self._begins_twice,
            sampler_epochs=epochs,
            dataset_epoch=epoch_of(self._dataset),
            is_over=is_over,
        )


class DrawnEpoch:
    """What all epochs know of their draws."""

    _draws: Draws
    _is_over: bool

    @property
    def is_over(self) -> bool:
        """Whether the loop has met the end."""
        return self._is_over

    @property
    def number(self) -> int:
        """Which epoch of its loader it is, from 0."""
        return self._draws.epoch

    @property
    def is_stale(self) -> bool:
        """Whether `set_epoch` was called on the sampler since its indices were drawn."""
        return self._draws.is_stale


class _SamplerSource:
    """A loader's sampler. Looks through torch's own `BatchSampler`, which has no state."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches = loader.batch_sampler
        self._batches = batches if type(batches) is BatchSampler else None
        self.sampler: Any = loader.sampler if batches is None else batches
        if self._batches is not None:
            self.sampler = self._batches.sampler
        self.samplers = list(with_inner(loader.sampler, loader.batch_sampler))
        """All samplers that take part, outermost first."""
        self.with_epochs = [sampler for sampler in self.samplers if hasattr(sampler, "set_epoch")]
        """Those that may have an epoch."""
        self._iterator: Any = None
        self._iterator_state: Any = None
        """What the iterator is to load when it is made."""
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self._seeds_pipe = is_seeded_pipe(loader.dataset)

    @property
    def may_draw(self) -> bool:
        """Whether iterating may draw from the global generators, and nothing else tells how to repeat that."""
        if self.is_stream:
            return self._seeds_pipe
        return not (type(self.sampler) is SequentialSampler or is_stateful(self.sampler))

    def iterate(self, state: tuple[Any, Any] | None = None, epochs: Sequence[int] = ()) -> Iterator[Any]:
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
        if self._batches is not None:
            size, drop_last = self._batches.batch_size, self._batches.drop_last
            arrays = batched_arrays(self.sampler, size, drop_last=drop_last)
            if arrays is not None and not is_stateful(self.sampler):
                return arrays
            return _batched(self._begin_iterator, size, drop_last=drop_last)
        return self._begin_iterator()

    def _begin_iterator(self) -> Iterator[Any]:
        self._iterator = iter(self.sampler)
        if self._iterator_state is not None:
            self._iterator.load_state_dict(self._iterator_state)
            self._iterator_state = None
        return self._iterator  # type: ignore[no-any-return]

    def state_of_sampler(self) -> tuple[Any, None] | None:
        """Return a copy of the present state of the sampler alone; None if it has none."""
        return (deepcopy(self.sampler.state_dict()), None) if is_stateful(self.sampler) else None

    def state(self) -> tuple[Any, Any] | None:
        """Return copies of the present states of the sampler and its iterator."""
        if self._iterator is None:  # of torch's own samplers
            return None
        of_sampler = deepcopy(self.sampler.state_dict()) if is_stateful(self.sampler) else None
        of_iterator = None
        if self._iterator is not self.sampler and is_stateful(self._iterator):
            of_iterator = deepcopy(self._iterator.state_dict())
        return None if of_sampler is None and of_iterator is None else (of_sampler, of_iterator)


def _batched(begin: Callable[[], Iterator[Any]], batch_size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield what torch's `BatchSampler` yields for the indices that `begin` returns."""
    indices = begin()
    while batch := list(islice(indices, batch_size)):
        if len(batch) < batch_size and drop_last:
            return
        yield batch
