"""One pass over the data: what `iter(loader)` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

from swift_loader.bad_samples import SampleFailure
from swift_loader.device.ahead import Source

__all__ = ["EpochIterator", "OpenEpoch"]


class IteratorState(Enum):
    """FRESH ─first next─► ACTIVE ─► DONE or FAILED, or SUPERSEDED by an iterator that began later."""

    FRESH = "fresh"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """An epoch that the engine is at."""

    epoch: int
    first_step: int
    """Where the pass begins: 0, unless it goes on where another one was stopped."""
    num_batches: int
    """Of the epoch, those before the first step included."""
    source: Source


class EpochOwner(Protocol):
    """The loader, as far as its iterators know it."""

    def open_epoch(self, iterator: EpochIterator) -> OpenEpoch:
        """Begin an epoch for an iterator; any iterator before it is superseded."""
        ...

    def note_failures(self, failures: tuple[SampleFailure, ...]) -> None:
        """Take note of the samples that the batch that comes next does without; raises if they are too many."""
        ...

    def warn_of_failures(self) -> None:
        """Warn of the samples that failed in the pass that is over, if that wasn't done before."""
        ...

    def note_delivery(self, step: int, num_steps: int, failures: tuple[SampleFailure, ...]) -> None:
        """Take note that this step was handed to the loop, and that so many of the epoch's steps are done now."""
        ...

    def note_end(self) -> None:
        """Take note that the loop has seen the end of the epoch."""
        ...


class EpochIterator:
    """Iterates over one epoch, chosen at the first `next`: an iterator that is thrown away unused costs nothing.

    Errors stay: after one, each `next` raises it again. So does the end.
    """

    def __init__(self, owner: EpochOwner) -> None:
        self._owner = owner
        self._state = IteratorState.FRESH
        self._open: OpenEpoch | None = None
        self._num_steps = 0
        """Of the epoch that are done, those before the pass included."""
        self._error: BaseException | None = None

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        if self._state is IteratorState.FRESH:
            self._owner.warn_of_failures()  # of a pass that was left; raised as an error, it leaves this iterator fresh
            self._guard(self._begin)
        self._check_current()
        if self._state is IteratorState.FAILED:
            assert self._error is not None
            raise self._error
        assert self._open is not None
        if self._state is IteratorState.DONE:
            raise StopIteration
        if self._num_steps >= self._open.num_batches:
            self._state = IteratorState.DONE
            self._owner.note_end()
            self._owner.warn_of_failures()
            raise StopIteration
        delivery = self._guard(self._open.source.take)
        self._check_current()  # another thread may have begun a pass, or loaded a state, while this one waited
        assert delivery.epoch == self._open.epoch
        if delivery.failures:
            self._guard(partial(self._owner.note_failures, delivery.failures))
        self._num_steps += 1
        self._owner.note_delivery(delivery.step, self._num_steps, delivery.failures)
        return delivery.batch

    def __len__(self) -> int:
        """Batches that are still to come, if the pass has begun; all of them otherwise."""
        total = len(self._owner) if self._open is None else self._open.num_batches  # type: ignore[arg-type]
        return total - self._num_steps

    def supersede(self) -> None:
        """A newer iterator has begun its pass: this one can't go on."""
        if self._state is IteratorState.ACTIVE:
            self._state = IteratorState.SUPERSEDED

    def _check_current(self) -> None:
        if self._state is IteratorState.SUPERSEDED:
            raise RuntimeError(
                "this iterator was superseded by a newer one of the same loader, or by load_state_dict() or a new "
                "collate_fn; finish one pass before beginning the next, or make a second loader"
            )

    def _begin(self) -> None:
        self._open = self._owner.open_epoch(self)
        self._num_steps = self._open.first_step
        self._state = IteratorState.ACTIVE

    def _guard(self, step: Callable[[], Any]) -> Any:
        """Run a step whose errors are to stay; an interrupt is none."""
        try:
            try:
                return step()
            except StopIteration as stop:  # of the user's code: a collate function, a decoder, a constructor
                raise RuntimeError("the user's code raised StopIteration, which would end the epoch early") from stop
        except Exception as error:
            self._state = IteratorState.FAILED
            self._error = error
            self._open = None
            raise

    def __repr__(self) -> str:
        where = f" epoch {self._open.epoch}, {self._num_steps} of {self._open.num_batches}" if self._open else ""
        return f"<EpochIterator {self._state.value}{where}>"
