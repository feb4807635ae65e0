"""Draws the indices of an epoch from a loader's sampler, as torch does, and remembers how to draw them again.

Samplers draw from a `torch.Generator` of their own, from torch's default generator, from `random` or from the legacy
`numpy.random`. A sampler without a `state_dict` is resumed by drawing again from the same states. All of this runs on
the loop's thread, as the sampler is the user's code.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from swift_loader.dataloader.indices import SamplerSource, SamplerState, epoch_of
from swift_loader.dataloader.state import DrawsState, as_torch, pack_bytes, pack_states, set_states, unpack_states
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.transport.task import IndexArray
from swift_loader.worker.stream import is_stateful

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
        from 0. `base_seed`: that of an earlier epoch, if workers keep it; None: draw it.
        """
        self._seed: int | None = getattr(loader, "_order_seed", None)
        self._state_at_first: torch.Tensor | None = None
        """With a seed, that of the generator at the first draw, since another iterator may have seeded it meanwhile."""
        self._dataset, self._generator = loader.dataset, loader.generator  # not the loader: it refers to its epoch
        self._source = SamplerSource(loader)
        found = (getattr(owner, "generator", None) for owner in (loader, *self._source.samplers))
        self._own = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
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
        self.num_drawn = 0
        if state is not None and len(state.generators) == len(self._own):
            for generator, packed in zip(self._own, state.generators, strict=True):
                generator.set_state(as_torch(packed))
        if state is not None and not state.is_over:
            self.begun = state
            """Where it began, or where it continues."""
            self._continue(state)
            return
        if state is not None:
            epoch = state.epoch + 1
            if state.sampler_state is not None:
                self._source.iterate(state.sampler_state)
        self.begun = self._begin(epoch, base_seed, has_workers=bool(loader.num_workers))

    def _begin(self, epoch: int, base_seed: int | None, *, has_workers: bool) -> DrawsState:
        """Begin afresh, with the same draws as torch. Return where that is."""
        if self._seed is not None:
            self._generator.manual_seed(derive_key(self._seed, Purpose.GENERATOR.value, epoch))
        own, draws_seed = self._pack_own(), base_seed is None
        before = states_of(_GENERATORS) if self._source.may_draw else None
        self._iterator = self._source.iterate()
        of_sampler, _ = self._source.state_of_sampler() or (None, None)
        if before is not None:
            self._used = {name: before[name] for name in _changed_since(before)}
        base_seed = self._draw_base_seed() if base_seed is None else base_seed
        if begins_twice := has_workers and draws_seed and not is_stateful(self._source.sampler):
            self._iterator = self._source.iterate()  # as torch: a sampler may draw when it is iterated
        if self._seed is not None:
            self._state_at_first = self._generator.get_state()
        if before is not None:
            self._untold = before, states_of(_GENERATORS)
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
        if self._source.epochs and state.sampler_state is None:
            self._iterator = self._draw_again_later(state)
        else:
            self._iterator = self._draw_again(state)

    def _draw_again_later(self, state: DrawsState) -> Iterator[Any]:
        """Draw again when the first batch is asked for: Lightning calls `set_epoch` after `iter`."""
        yield from self._draw_again(state, draws_first=True)

    def _draw_again(self, state: DrawsState, *, draws_first: bool = False) -> Iterator[Any]:
        """Return an iterator over what is left to draw. `draws_first`: it is asked for the first of it at once."""
        counts = state.sampler_state is None and not self._source.is_stream
        num_again = state.num_drawn if counts else 0
        first = _NOTHING
        with _applied(self._used), self._source.at_epochs(state.sampler_epochs if num_again else None):
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

    def _pack_own(self) -> list[str]:
        return [pack_bytes(generator.get_state().numpy().tobytes()) for generator in self._own]

    def next(self) -> Drawn | None:
        """Return the next draw; None at the end. What the sampler raises, this raises."""
        if self._replayed:
            return self._next_replayed()
        if self._sampler_epochs is None:
            self._sampler_epochs = self._source.epochs
        if self._state_at_first is not None:
            self._generator.set_state(self._state_at_first)
            self._state_at_first = None
        indices = next(self._iterator, _NOTHING)  # not by `for`, which would call `__iter__` again
        self._epochs_now = self._source.epochs  # Accelerate's sampler counts its epochs itself
        if self._untold is not None and indices is not _NOTHING:
            (began, seeded), self._untold = self._untold, None
            self._used = {name: began[name] for name in _changed_since(seeded)} | self._used
        if indices is _NOTHING:
            return None
        drawn = Drawn(self.num_drawn, indices, self._source.state())
        self.num_drawn += 1
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
        if not num_drawn and sampler_state is None:
            sampler_state = self.begun.sampler_state
        of_sampler, of_iterator = sampler_state or (None, None)
        used = self._used if self._untold is None else self._untold[0]
        return replace(
            self.begun,
            num_drawn=num_drawn,
            of_sampler=of_sampler,
            of_iterator=of_iterator,
            generators=self._pack_own() if is_over else self.begun.generators,
            global_states={} if is_over or sampler_state is not None else pack_states(used),
            is_begun=self._untold is None,
            sampler_epochs=self._source.epochs if self._sampler_epochs is None else self._sampler_epochs,
            dataset_epoch=epoch_of(self._dataset),
            is_over=is_over,
        )


# The global generators ------------------------------------------------------------------------------------------

States = dict[str, Any]
"""States of global generators, by name."""

_GENERATORS: dict[str, Any] = {"torch": torch.default_generator, "python": random, "numpy": np.random}
"""What has the state of each."""


def states_of(names: Iterable[str]) -> States:
    """Return the present states of these global generators."""
    return {name: random.getstate() if name == "python" else _GENERATORS[name].get_state() for name in names}


def _changed_since(before: States) -> list[str]:
    """Return the generators among these that have been drawn from since."""
    return [name for name, state in states_of(before).items() if not _are_equal(name, state, before[name])]


def _are_equal(name: str, one: Any, other: Any) -> bool:
    if name == "torch":
        return torch.equal(one, other)
    return bool(one == other) if name == "python" else one[2:] == other[2:] and np.array_equal(one[1], other[1])


@contextmanager
def _applied(states: States) -> Iterator[None]:
    """Set the generators to these states, and afterwards to those that they had before."""
    before = states_of(states)
    try:
        set_states(_GENERATORS, states)
        yield
    finally:
        set_states(_GENERATORS, before)
