"""One pass over the data: what `iter(loader)` returns.

Any thread may call `next`. Threads take turns, and each batch goes to one of them. If a signal handler raises, the
exception comes out of `next`, and the pass continues with the next batch. If the handler interrupted something that
can't be repeated, the pass ends with a `SwiftLoaderError` instead.
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
from swift_loader.delivery.delivery import Delivery
from swift_loader.device.ahead import Source
from swift_loader.errors import SwiftLoaderError
from swift_loader.executors.process.forks import check_process

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
    """An epoch that the engine is working on."""

    epoch: int
    first_step: int
    """The step at which the pass begins: 0, unless it resumes a stopped epoch."""
    num_batches: int
    """Batches of the whole epoch, including those before the first step."""
    source: Source
    owner_pid: int | None
    """The only process that may continue the pass. None: forks may too, because they have a copy of everything."""


class Turns:
    """Lets one thread at a time take a batch from a loader."""

    def __init__(self) -> None:
        # Reentrant: a signal handler that calls next() while its own thread is in next() gets an error, not a deadlock.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self.is_taken = False

    def check_free(self) -> None:
        """Raise `RuntimeError` if this thread is already taking a batch."""
        if self.is_taken:
            raise RuntimeError(
                "next() was called while this thread is already within next() of the same loader, by a signal handler "
                "or by code that builds or decodes a batch. Call next() in the training loop only"
            )

    def lock(self) -> AbstractContextManager[object]:
        """Return the lock that a thread holds while it takes a batch."""
        if os.getpid() != self._pid:  # a fork: the thread that may hold the lock doesn't exist here
            self._lock, self._pid, self.is_taken = threading.RLock(), os.getpid(), False
        return self._lock


_Noted = tuple["int | None", tuple[SampleFailure, ...]]
"""The step of a batch, if there is one, and its failed samples."""


class EpochOwner(Protocol):
    """The part of the loader that its iterators use."""

    turns: Turns
    """Shared by all its iterators."""

    @property
    def has_started(self) -> bool:
        """Whether the engine has been started. If not, opening an epoch starts it and so builds the dataset."""
        ...

    def open_epoch(self, iterator: EpochIterator) -> OpenEpoch:
        """Begin an epoch for an iterator. Any earlier iterator is superseded."""
        ...

    def note_failures(self, failures: tuple[SampleFailure, ...]) -> None:
        """Record the failed samples of the next batch; raises `TooManyErrors` if there are too many."""
        ...

    def warn_of_failures(self) -> None:
        """Warn about the failed samples of the last pass, unless that was done."""
        ...

    def note_delivery(self, step: int | None, num_steps: int, failures: tuple[SampleFailure, ...]) -> None:
        """Record that the loop got this step, and that `num_steps` steps of the epoch are done."""
        ...

    def note_end(self) -> None:
        """Record that the loop reached the end of the epoch."""
        ...


class EpochIterator:
    """Iterates over one epoch, which the first `next` chooses. An iterator that is never used costs nothing.

    Errors are permanent: after one, each `next` raises it again. The same holds for the end of the epoch.
    """

    def __init__(self, owner: EpochOwner) -> None:
        self._owner = owner
        self._state = IteratorState.FRESH
        self._open: OpenEpoch | None = None
        self._num_steps = 0
        """Steps of the epoch that are done, including those before the pass."""
        self._taken: Delivery | None = None
        """A batch that was taken but not handed out. Kept because an interrupt may come in between."""
        self._last: _Noted = (None, ())
        """Describes the last batch that was handed out; `_before` describes the one before it."""
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
                    # No signal handler can run between these three lines.
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
        """Keep a batch for the next call, if an interrupt came at the last moment before it was handed out."""
        if handed_out is not None:
            self._taken, self._last, self._num_steps = handed_out, self._before, self._num_steps - 1
        if self._taken is not None:  # the owner may have recorded it as delivered
            step, failures = self._last
            self._owner.note_delivery(step, self._num_steps, failures)

    def _advance(self) -> Delivery:
        """Return the next batch to hand out. Keep it until it is handed out."""
        if self._state is IteratorState.FRESH:
            self._owner.warn_of_failures()  # of an unfinished pass; if the warning raises, this iterator stays fresh
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
        self._check_current()  # another thread may have called load_state_dict() while this one waited
        if delivery.failures:
            self._guard(partial(self._owner.note_failures, delivery.failures))
        return delivery

    def _take(self, opened: OpenEpoch) -> Delivery:
        """Take the next batch from the source, and keep it until it is handed out."""
        delivery = opened.source.take()
        num_before = delivery.step if delivery.num_before is None else delivery.num_before
        if delivery.error is not None:
            self._fail(delivery.error)
        elif (delivery.epoch, num_before) != (opened.epoch, self._num_steps):
            self._fail(
                SwiftLoaderError(
                    f"batch {self._num_steps} of epoch {opened.epoch} is lost because a signal handler raised an "
                    f"exception that interrupted the loop while it took the batch. Start a new pass"
                )
            )
        self._check_failed()
        self._taken = delivery
        return delivery

    def __len__(self) -> int:
        """Batches that are still to come, including all of them before the first `next`."""
        total = len(self._owner) if self._open is None else self._open.num_batches  # type: ignore[arg-type]
        return total - self._num_steps

    def supersede(self) -> None:
        """End this pass because a newer one has begun."""
        if self._state is IteratorState.ACTIVE:
            self._state = IteratorState.SUPERSEDED

    def _check_current(self) -> None:
        if self._state is IteratorState.SUPERSEDED:
            raise RuntimeError(
                "this iterator can't continue: it was superseded by a newer one of the same loader, or by "
                "load_state_dict() or a new collate_fn. Finish one pass before the next, or make a second loader"
            )

    def _begin(self) -> None:
        self._open = self._owner.open_epoch(self)
        self._num_steps = self._open.first_step
        self._state = IteratorState.ACTIVE

    def _guard(self, step: Callable[[], Any]) -> Any:
        """Run a step and make its errors permanent. An exception of a signal handler isn't."""
        was_started = self._owner.has_started
        try:
            return step()
        except Exception as error:
            # Our own errors and those of the dataset's constructor. Any other error comes from a signal handler.
            if was_started and not isinstance(error, SwiftLoaderError):
                raise
            self._fail(error)
            self._check_failed()

    def _fail(self, error: BaseException) -> None:
        """End the pass: each `next` raises this error from now on."""
        if isinstance(error, StopIteration):  # from the user's code: a collate function, a decoder, a constructor
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
