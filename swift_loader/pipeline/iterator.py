"""The iterator over one epoch of a pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from swift_loader.errors import LoaderClosed
from swift_loader.executors.calls.event_loop import EventLoop
from swift_loader.pipeline.chain import Chain
from swift_loader.pipeline.items import Item, Marker, Place
from swift_loader.pipeline.run import Run
from swift_loader.pipeline.sources import SourceStates
from swift_loader.pipeline.state import PipelineState

__all__ = ["OpenRun", "PipelineIterator", "Position"]


@dataclass(slots=True)
class OpenRun:
    """A run, and what still comes out of it."""

    run: Run
    items: Iterator[Item]
    epoch: int
    """Of the next item."""

    @classmethod
    def open(cls, chain: Chain, state: PipelineState, event_loop: EventLoop) -> OpenRun:
        """Open a pipeline at a state.

        Raises:
            Exception: Whatever starting its processes raised. Nothing is left behind.
        """
        run = Run(state.epoch, state.seed, event_loop)
        try:
            items = chain.open(state.place or chain.beginning, iter(state.sources), run, state.seed)
        except BaseException:
            run.close()
            raise
        return cls(run, items, state.epoch)


@dataclass(slots=True)
class Position:
    """Where a loop is. It outlives the iterator, so that a state can be had after the loop was left."""

    epoch: int
    place: Place | None = None
    """After the last result that the loop got; None: before the first."""
    is_over: bool = False
    """Whether the loop got all results of the epoch."""
    sources: list[SourceStates] = field(default_factory=list)
    """Of the run."""
    source_starts: tuple[Any, ...] = ()
    """What the run began with."""

    def advance(self, place: Place, chain: Chain) -> None:
        """Move to the place after a result. Source states before it aren't needed any more."""
        self.place = place
        for states, number in zip(self.sources, chain.source_numbers(place), strict=True):
            if states and number is not None:
                states.latest((self.epoch, number))

    def to_state(self, chain: Chain, seed: int) -> PipelineState:
        """Return the state of this position."""
        epoch = self.epoch + self.is_over
        if self.is_over or self.place is None:
            states = tuple(states.latest((epoch, 0)) for states in self.sources)
            is_known = any(state is not None for state in states)
            starts = () if self.is_over else self.source_starts
            return PipelineState(epoch, None, seed, chain.parameters, states if is_known else starts)
        pairs = zip(self.sources, chain.source_numbers(self.place), strict=True)
        found = tuple(None if number is None else states.latest((epoch, number)) for states, number in pairs)
        return PipelineState(epoch, self.place, seed, chain.parameters, found)


class PipelineIterator(Iterator[Any]):
    """One epoch's results. Closes its run at the end, at an error, and when nobody refers to it any more."""

    def __init__(self, chain: Chain, opened: OpenRun, position: Position, idle: list[OpenRun]) -> None:
        """Begin an epoch.

        Args:
            chain: What runs.
            opened: The run.
            position: Where it begins. The iterator moves it.
            idle: Gets the run at the end of the epoch, if it goes on with the next one.
        """
        self._chain = chain
        self._position = position
        self._opened: OpenRun | None = opened
        self._items = opened.items
        self._idle = idle
        self._error: BaseException | None = None
        self._closing = weakref.finalize(self, opened.run.close)

    @property
    def run(self) -> Run | None:
        """What runs; None once it was closed or handed over."""
        return None if self._opened is None else self._opened.run

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._opened is None:
            raise StopIteration
        self._opened.run.check_owner()
        try:
            item = next(self._items, None)
        except BaseException as error:
            self._error = error
            self.close()
            raise
        if item is None:
            self._position.is_over = True
            self.close()
            raise StopIteration
        if item.value is Marker.EPOCH_END:
            self._position.is_over = True
            self._hand_over()
            raise StopIteration
        self._position.advance(item.after, self._chain)
        return item.value

    def _hand_over(self) -> None:
        """Keep the run for the next epoch."""
        assert self._opened is not None, "an epoch has ended"
        self._opened.epoch += 1
        self._idle.append(self._opened)
        self._closing.detach()
        self._opened = None

    def close(self) -> None:
        """End all threads and processes. Idempotent. Later calls of `next` raise `StopIteration` or the error."""
        if self._opened is not None and not self._position.is_over and self._error is None:
            self._error = LoaderClosed("the pipeline was closed; iterate over it again")
        self._closing()
        self._opened = None
        self._items = iter(())

    def __repr__(self) -> str:
        return f"<PipelineIterator {'closed' if self._opened is None else 'running'}, {self._position}>"
