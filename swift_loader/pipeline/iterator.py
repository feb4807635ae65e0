"""The iterator over one epoch of a pipeline."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from swift_loader.errors import LoaderClosed, SwiftLoaderError
from swift_loader.interrupts import is_interrupt, run_finalizer
from swift_loader.pipeline.chain import Chain
from swift_loader.pipeline.items import Item, Marker, Place
from swift_loader.pipeline.run import Run
from swift_loader.pipeline.sources import SourceBegin, SourceStates
from swift_loader.pipeline.state import PipelineState


@dataclass(slots=True)
class OpenRun:
    """A run, and what still comes out of it."""

    run: Run
    items: Iterator[Item]
    epoch: int
    """Of the next item."""


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
    passes_end: bool = False
    """Whether the next epoch follows if nothing is left of this one at the place."""
    told: int | None = None
    """The epoch that the sources were told; None: none."""

    def advance(self, place: Place, chain: Chain) -> None:
        """Move to the place after a result. Source states before it aren't needed any more."""
        self.place = place
        for states, number in zip(self.sources, chain.source_numbers(place), strict=True):
            if states and number is not None:
                states.latest((self.epoch, number))

    def to_state(self, chain: Chain, seed: int) -> PipelineState:
        """Return the state of this position."""
        epoch = self.epoch + self.is_over
        told = epoch if chain.origin.is_endless and self.told is not None else self.told
        if self.is_over or self.place is None:
            states = tuple(states.latest((epoch, 0)) for states in self.sources)
            is_known = any(state is not None for state in states)
            starts = () if self.is_over else self.source_starts
            return PipelineState(epoch, None, seed, chain.parameters, states if is_known else starts, told)
        pairs = zip(self.sources, chain.source_numbers(self.place), strict=True)
        found = tuple(None if number is None else states.latest((epoch, number)) for states, number in pairs)
        return PipelineState(epoch, self.place, seed, chain.parameters, found, told)

    def begins(self) -> list[SourceBegin | None]:
        """Return the states of the sources at the beginning of the next epoch, if the loop got all of this one."""
        return [states.latest((self.epoch + 1, 0)) for states in self.sources] if self.is_over else []


Begin = Callable[["PipelineIterator"], tuple[OpenRun, Position, list[OpenRun]]]
"""Begins the next epoch for an iterator.

Gives what runs, a position that the iterator moves, and the list that gets the run at the end of the epoch, if it goes
on with the next one.
"""


class PipelineIterator(Iterator[Any]):
    """One epoch's results. Closes its run at the end, at an error, and when nobody refers to it any more.

    The first `next` begins the epoch: frameworks call `iter` early, and then load a state or set the epoch.
    """

    def __init__(self, chain: Chain, begin: Begin) -> None:
        """Begin nothing yet."""
        self._chain = chain
        self._begin: Begin | None = begin
        """None once it has begun, so that the pipeline may go."""
        self._position: Position | None = None
        self._opened: OpenRun | None = None
        self._items: Iterator[Item] = iter(())
        self._idle: list[OpenRun] = []
        self._error: BaseException | None = None
        self._closing: weakref.finalize[..., PipelineIterator] | None = None
        self._lock = threading.RLock()
        """Held by the thread in `next`: several may share the iterator. `close` needs no lock."""

    @property
    def run(self) -> Run | None:
        """What runs; None before the first `next`, and once it was closed or handed over."""
        opened = self._opened  # another thread may close it meanwhile
        return None if opened is None else opened.run

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if (run := self.run) is not None:
            run.owner.check()
        has_turn = False
        try:
            with self._lock:
                if self._error is not None:  # of the thread that was here before
                    raise self._error
                has_turn = True
                begin = self._begin  # another thread may close the pipeline meanwhile
                item = self._pull() if begin is None else self._first(begin)
                if item is not None:
                    assert self._position is not None, "it has begun"
                    self._position.advance(item.after, self._chain)
        except BaseException as error:
            if has_turn:  # an item may be lost
                self._fail(error)
            raise
        if item is None:
            raise StopIteration
        return item.value

    def _fail(self, error: BaseException) -> None:
        """End the pass. What a signal handler raised comes out of one call, and later ones raise an error of ours."""
        self._error = error
        if isinstance(error, KeyboardInterrupt) or is_interrupt(error):
            self._error = SwiftLoaderError(
                f"the loop was interrupted ({type(error).__name__}) while it took an item, so the pipeline was closed; "
                f"iterate over it again"
            )
            self._error.__cause__ = error
        self.close()

    def _first(self, begin: Begin) -> Item | None:
        """Begin, and return the first item; None if there is none."""
        self._begin = None
        position = self._open(begin)
        item = self._pull()
        if item is None and position.passes_end:
            self._open(begin)
            item = self._pull()
        return item

    def _open(self, begin: Begin) -> Position:
        opened, self._position, self._idle = begin(self)
        self._opened, self._items = opened, opened.items
        if self._error is not None:  # another thread closed the pipeline, when not all of it was there
            opened.run.close()
            raise self._error
        return self._position

    def own(self, run: Run) -> None:
        """Close this run at the end. Called before it starts anything, so that no interrupt comes in between."""
        self._closing = weakref.finalize(self, run.close)

    def _pull(self) -> Item | None:
        """Return the next item; None at the end of the epoch."""
        item = next(self._items, None)
        if item is not None and item.value is not Marker.EPOCH_END:
            return item
        if self._error is not None:  # another thread closed the pipeline meanwhile
            raise self._error
        if self._opened is not None:
            assert self._position is not None, "it has begun"
            self._position.is_over = True
            if item is None:
                self.close()
            else:
                self._hand_over(self._opened)
        return None

    def _hand_over(self, opened: OpenRun) -> None:
        """Keep the run for the next epoch."""
        assert self._closing is not None, "it has begun"
        opened.epoch += 1
        self._idle.append(opened)
        self._closing.detach()
        self._opened, self._items = None, iter(())

    def close(self) -> None:
        """End all threads and processes. Idempotent. Later calls of `next` raise `StopIteration` or the error."""
        is_over = self._position is not None and self._position.is_over
        if self._error is None and not is_over:
            self._error = LoaderClosed("the pipeline was closed; iterate over it again")
        self._begin = None
        if self._closing is not None:
            run_finalizer(self._closing)
        self._opened, self._items = None, iter(())

    def __repr__(self) -> str:
        return f"<PipelineIterator {'closed' if self._opened is None else 'running'}, {self._position}>"
