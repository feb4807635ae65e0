"""One pass over the data: what `iter(loader)` returns.

Any thread may ask for the next batch; they take turns, and each batch goes to one of them. What a signal's handler
raises comes out of `next` and changes nothing: the pass goes on with the next batch, or, where the handler interrupted
something that can't be repeated, ends with a `SwiftLoaderError`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

from swift_loader.bad_samples import SampleFailure
from swift_loader.device.ahead import Source
from swift_loader.engine.base import Delivery
from swift_loader.engine.forks import check_process
from swift_loader.errors import SwiftLoaderError

__all__ = ["EpochIterator", "OpenEpoch", "Turns"]


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
    owner_pid: int | None
    """The process that may go on with it; None: any fork of it, too, with a copy of all there is."""


class Turns:
    """Lets the threads that ask one loader for batches do so one after another."""

    def __init__(self) -> None:
        # Reentrant: a handler of a signal that asks for a batch while its own thread does is refused, and doesn't hang.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self.is_taken = False

    def check_free(self) -> None:
        """Refuse to give a thread its turn that has it already."""
        if self.is_taken:
            raise RuntimeError(
                "next() was called while this thread is within next() of the same loader: by the handler of a signal, "
                "or by code that builds or takes in a batch. Take batches in the loop only"
            )

    def lock(self) -> AbstractContextManager[object]:
        """Return what a thread holds while it has its turn."""
        if os.getpid() != self._pid:  # a fork: the thread that has it isn't here
            self._lock, self._pid, self.is_taken = threading.RLock(), os.getpid(), False
        return self._lock


_Noted = tuple["int | None", tuple[SampleFailure, ...]]
"""The step of a batch, if there is one, and the samples that it does without."""


class EpochOwner(Protocol):
    """The loader, as far as its iterators know it."""

    turns: Turns
    """One for all its iterators."""

    @property
    def has_started(self) -> bool:
        """Whether the engine runs, or did; before, opening an epoch starts it, and so builds the dataset."""
        ...

    def open_epoch(self, iterator: EpochIterator) -> OpenEpoch:
        """Begin an epoch for an iterator; any iterator before it is superseded."""
        ...

    def note_failures(self, failures: tuple[SampleFailure, ...]) -> None:
        """Take note of the samples that the batch that comes next does without; raises if they are too many."""
        ...

    def warn_of_failures(self) -> None:
        """Warn of the samples that failed in the pass that is over, if that wasn't done before."""
        ...

    def note_delivery(self, step: int | None, num_steps: int, failures: tuple[SampleFailure, ...]) -> None:
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
        self._taken: Delivery | None = None
        """What wasn't handed out yet; kept, because an interrupt may come before it is."""
        self._last: _Noted = (None, ())
        """Of the batch that was handed out last, and of the one before it."""
        self._before: _Noted = (None, ())
        self._error: BaseException | None = None

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        turns, handed_out = self._owner.turns, None
        try:
            with turns.lock():
                turns.check_free()
                try:
                    turns.is_taken = True
                    delivery = self._advance()
                    self._owner.note_delivery(delivery.step, self._num_steps + 1, delivery.failures)
                    # Nothing can interrupt these three lines.
                    handed_out, self._taken = delivery, None
                    self._before, self._last = self._last, (delivery.step, delivery.failures)
                    self._num_steps += 1
                finally:
                    turns.is_taken = False
        except BaseException:
            self._take_back(handed_out)
            raise
        return handed_out.batch

    def _take_back(self, handed_out: Delivery | None) -> None:
        """Keep a batch for the next time that an interrupt kept from being handed out at the last moment."""
        if handed_out is not None:
            self._taken, self._last, self._num_steps = handed_out, self._before, self._num_steps - 1
        if self._taken is not None:  # and may have been noted as delivered
            step, failures = self._last
            self._owner.note_delivery(step, self._num_steps, failures)

    def _advance(self) -> Delivery:
        """Return what is to be handed out next, and keep it."""
        if self._state is IteratorState.FRESH:
            self._owner.warn_of_failures()  # of a pass that was left; raised as an error, it leaves this iterator fresh
            self._guard(self._begin)
        self._check_current()
        self._check_failed()
        opened = self._open
        assert opened is not None
        if opened.owner_pid is not None:
            check_process(opened.owner_pid)
        if self._state is IteratorState.DONE:
            raise StopIteration
        if self._num_steps >= opened.num_batches:
            self._state = IteratorState.DONE
            self._owner.note_end()
            self._owner.warn_of_failures()
            raise StopIteration
        delivery = self._taken or self._take(opened)
        self._check_current()  # another thread may have loaded a state while this one waited
        if delivery.failures:
            self._guard(partial(self._owner.note_failures, delivery.failures))
        return delivery

    def _take(self, opened: OpenEpoch) -> Delivery:
        """Return the next batch, which is kept until it is handed out."""
        delivery = opened.source.take()
        num_before = delivery.step if delivery.num_before is None else delivery.num_before
        if delivery.error is not None:
            self._fail(delivery.error)
        elif (delivery.epoch, num_before) != (opened.epoch, self._num_steps):
            self._fail(
                SwiftLoaderError(
                    f"the loop was interrupted while it took batch {self._num_steps} of epoch {opened.epoch}, which is "
                    f"lost: the handler of a signal raised an exception there. Begin a new pass"
                )
            )
        self._check_failed()
        self._taken = delivery
        return delivery

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
        was_started = self._owner.has_started
        try:
            return step()
        except Exception as error:
            # Of ours, or of the dataset's constructor. Another one comes from the handler of a signal.
            if was_started and not isinstance(error, SwiftLoaderError):
                raise
            self._fail(error)
            self._check_failed()

    def _fail(self, error: BaseException) -> None:
        """End the pass: each `next` raises this error from now on."""
        if isinstance(error, StopIteration):  # of the user's code: a collate function, a decoder, a constructor
            stop, error = error, RuntimeError("the user's code raised StopIteration, which would end the epoch early")
            error.__cause__ = stop
        self._state = IteratorState.FAILED
        self._error = error
        self._open = self._taken = None

    def _check_failed(self) -> None:
        if self._state is IteratorState.FAILED:
            assert self._error is not None
            raise self._error

    def __repr__(self) -> str:
        where = f" epoch {self._open.epoch}, {self._num_steps} of {self._open.num_batches}" if self._open else ""
        return f"<EpochIterator {self._state.value}{where}>"
