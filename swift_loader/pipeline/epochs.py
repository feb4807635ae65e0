"""The epochs of one pipeline: its runs one after the other, and where the loop is in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from swift_loader.errors import StateMismatch, warn
from swift_loader.executors.calls import CoroutineLoop
from swift_loader.options import default_seed
from swift_loader.pipeline.chain import Chain
from swift_loader.pipeline.iterator import OpenRun, PipelineIterator, Position
from swift_loader.pipeline.origins import Plain
from swift_loader.pipeline.run import Run
from swift_loader.pipeline.state import PipelineState
from swift_loader.pipeline.stats import Tally
from swift_loader.process_owner import ProcessOwner


class Epochs:
    """Begins the epochs of a chain, and knows the state. The loop's thread uses it; any thread may close it."""

    def __init__(self, chain: Chain, seed: int | None) -> None:
        """Begin with epoch 0. `seed`: the user's."""
        self._chain = chain
        self._given_seed = seed
        self._seed = default_seed() if seed is None else seed
        self._next_epoch = 0
        self._chosen: int | None = None
        """The epoch of `seek` since the last epoch began."""
        self._told: int | None = None
        """The epoch that the sources were told last; None: none."""
        self._loaded: PipelineState | None = None
        self._latest: weakref.ref[PipelineIterator] | None = None
        self.position: Position | None = None
        """Of the latest iterator."""
        self.tally = Tally()
        """The counts of the latest run; empty before the first."""
        self._idle: list[OpenRun] = []
        """The run of a continuous source, between two epochs."""
        self._event_loop = CoroutineLoop()
        """Stays from one epoch to the next: sessions of the user's belong to it."""
        self._maker = ProcessOwner()
        weakref.finalize(self, _free, self._idle, self._event_loop)

    def iterator(self) -> PipelineIterator:
        """Return an iterator over the next epoch, or over the rest of a loaded one. Its first `next` begins it."""
        return PipelineIterator(self._chain, self._begin)

    def _begin(self, iterator: PipelineIterator) -> tuple[OpenRun, Position, list[OpenRun]]:
        if not self._maker.is_here():  # in a fork, the run and the loop are the parent's
            self._maker, self._event_loop, self._idle = ProcessOwner(), CoroutineLoop(), []
        loaded = self._loaded
        state = loaded or PipelineState(self._next_epoch, None, self._seed)
        self._warn_of_iterator()
        self._latest = weakref.ref(iterator)  # first, because another thread may close it while it opens
        opened = self._continued(state.epoch, iterator) if loaded is None else None
        _close_all(self._idle)
        if opened is None:
            opened = self._open(state, iterator)
        passes_end = state.place is not None and self._chosen is None
        self._loaded = self._chosen = None
        sources = opened.run.sources
        position = Position(state.epoch, state.place, False, sources, state.sources, passes_end, self._told)
        self.position, self.tally = position, opened.run.tally
        self._next_epoch = state.epoch + 1
        return opened, position, self._idle

    def _continued(self, epoch: int, iterator: PipelineIterator) -> OpenRun | None:
        """Return the run that goes on with this epoch, if there is one."""
        for opened in self._idle:
            if opened.epoch == epoch:
                iterator.own(opened.run)
                self._idle.remove(opened)
                return opened
        return None

    def _open(self, state: PipelineState, iterator: PipelineIterator) -> OpenRun:
        """Open a run. The sources are told their epoch, if they were told it where the state was taken.

        Raises what starting its processes raised, and leaves nothing behind then.
        """
        if state.told is not None and self._chosen is None:  # else the user has told them since
            self._tell(state.told)
        elif self._told is not None and self._chain.origin.is_endless:
            self._tell(state.epoch)  # the run before has told them later ones
        begins = [] if self.position is None else self.position.begins()
        told, chain = self._told is not None, self._chain
        run = Run(state, self._event_loop, chain.max_errors, tells_epochs=told, begins=begins)
        iterator.own(run)
        try:
            items = chain.open(state.place or chain.beginning, iter(state.sources), run, state.seed)
            if chain.max_errors is not None and not any(policy.skips for policy in run.tally.policies):
                raise ValueError(f"max_errors={chain.max_errors} has no effect without a stage with on_error='skip'")
        except BaseException:
            run.close()
            raise
        return OpenRun(run, items, state.epoch)

    def _tell(self, epoch: int) -> None:
        self._chain.origin.set_epoch(epoch)
        self._told = epoch

    def _warn_of_iterator(self) -> None:
        """Warn if the source gives its items only once, and has been iterated over."""
        origin = self._chain.origin
        if isinstance(origin, Plain) and self.position is not None and isinstance(origin.source, Iterator):
            warn(
                f"the source is an iterator, a {type(origin.source).__name__}, which gives its items only once; give a "
                f"list, or an object whose __iter__ begins anew"
            )

    def seek(self, epoch: int) -> None:
        """Begin with this epoch next. A loaded state of another epoch is dropped."""
        self._next_epoch = self._chosen = epoch
        if self._loaded is not None and self._loaded.epoch != epoch:
            self._loaded = None
        if self._idle and all(idle.epoch == epoch and idle.run.tells_epochs for idle in self._idle):
            self._told = epoch  # the run has gone on with this epoch, and told the sources
            return
        if self._chain.origin.has_epochs:
            _close_all(self._idle)  # it has gone on with an order that isn't this epoch's
        self._tell(epoch)

    # Resuming ---------------------------------------------------------------------------------------------------------

    def state(self) -> PipelineState:
        """Return where the loop is: after the last item that it got.

        Raises `StateMismatch` in the middle of an epoch, if a stage hands results on as they come.
        """
        if self._loaded is not None:
            return self._loaded
        position = self.position
        if position is None:
            return PipelineState(self._next_epoch, None, self._seed, self._chain.parameters, told=self._told)
        chosen = self._chosen
        if chosen is not None and self.run is None and (position.is_over or chosen != position.epoch):
            begins = tuple(position.begins())
            known = begins if any(begin is not None for begin in begins) else ()
            return PipelineState(chosen, None, self._seed, self._chain.parameters, known, self._told)
        if not (self._chain.is_exact or position.is_over or position.place is None):
            raise StateMismatch(
                "state_dict() doesn't work in the middle of an epoch with output_order='completion', because no place "
                "says which items are left. Call it at the end of an epoch, or give output_order='input'"
            )
        state, place = position.to_state(self._chain, self._seed), position.place
        if place is None or position.is_over or self._chain.origin.is_endless:
            return state
        return replace(state, failures=tuple(policy.num_at(place) for policy in self.tally.policies))

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue at a state with the next epoch that begins.

        Raises `TypeError` if it isn't a dict, `StateMismatch` if it isn't a state of a pipeline with these stages;
        nothing has changed then.
        """
        loaded = PipelineState.from_dict(state)
        if self._given_seed is not None and loaded.seed != self._given_seed:
            raise StateMismatch(
                f"the state has seed={loaded.seed}, but this pipeline was made with seed={self._given_seed}"
            )
        if loaded.place is not None:
            self._chain.check(loaded.place)
            if loaded.parameters != self._chain.parameters:
                raise StateMismatch(
                    f"the state is of a pipeline with {_listed(loaded.parameters)}, but this one has "
                    f"{_listed(self._chain.parameters)}; with others, the place means other items"
                )
        self._chain.origin.check_states(iter(loaded.sources))
        _close_all(self._idle)
        self._loaded, self._seed, self.position, self._chosen = loaded, loaded.seed, None, None

    # What they do -----------------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run | None:
        """What runs for the latest iterator; None if nothing does."""
        iterator = None if self._latest is None else self._latest()
        return None if iterator is None else iterator.run

    def close(self) -> None:
        """End the current iteration, with all threads and processes. Idempotent."""
        iterator = None if self._latest is None else self._latest()
        if iterator is not None:
            iterator.close()
        _free(self._idle, self._event_loop)


def _listed(parameters: tuple[str, ...]) -> str:
    return ", ".join(repr(text) for text in parameters) or "no stage that mixes items"


def _free(idle: list[OpenRun], event_loop: CoroutineLoop) -> None:
    _close_all(idle)
    event_loop.close()


def _close_all(idle: list[OpenRun]) -> None:
    while idle:
        idle.pop().run.close()
