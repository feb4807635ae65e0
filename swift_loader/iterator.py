"""One pass over the data: what `iter(loader)` returns.

Any thread may call `next`. Threads take turns, and each batch goes to one of them. If a signal handler raises, the
exception comes out of `next`, and the pass continues with the next batch. If the handler interrupted something that
can't be repeated, the pass ends with a `SwiftLoaderError` instead.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

from swift_loader.errors import SwiftLoaderError, TooManyErrors
from swift_loader.interrupts import is_interrupt
from swift_loader.passes import NOTHING, Passes
from swift_loader.scheduler.delivery import Delivery
from swift_loader.session import OpenEpoch


class IteratorState(Enum):
    """FRESH ─first next─► ACTIVE ─► DONE or FAILED, or SUPERSEDED by an iterator that began later."""

    FRESH = "fresh"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class EpochIterator:
    """Iterates over one epoch, which the first `next` chooses. An iterator that is never used costs nothing.

    Errors are permanent: after one, each `next` raises it again. The same holds for the end of the epoch.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._state = IteratorState.FRESH
        self._open: OpenEpoch | None = None
        self._num_steps = 0
        """Steps of the epoch that are done, including those before the pass."""
        self._taken: Delivery | None = None
        """A batch that was taken but not handed out. Kept because an interrupt may come in between."""
        self._last = NOTHING
        """The last batch that was handed out; `_before` is the one before it."""
        self._before = NOTHING
        self._error: BaseException | None = None

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        next_lock, handed_out = self._passes.next_lock, None
        try:
            with next_lock.lock():
                next_lock.check_free()
                try:
                    next_lock.taker = self
                    delivery = self._advance()
                    assert delivery.work is not None
                    delivered = (delivery.work.step, delivery.failures)
                    self._passes.note_delivery(delivered, self._num_steps + 1)
                    # No signal handler can run between these three lines.
                    handed_out, self._taken = delivery, None
                    self._before, self._last = self._last, delivered
                    self._num_steps += 1
                finally:
                    next_lock.taker = None
        except BaseException:
            self._take_back(handed_out)
            raise
        return handed_out.batch

    def _take_back(self, handed_out: Delivery | None) -> None:
        """Keep a batch for the next call, if an interrupt came at the last moment before it was handed out."""
        if handed_out is not None:
            self._taken, self._last, self._num_steps = handed_out, self._before, self._num_steps - 1
        if self._taken is not None:  # it may have been recorded as delivered
            self._passes.note_delivery(self._last, self._num_steps)

    def _advance(self) -> Delivery:
        """Return the next batch to hand out. Keep it until it is handed out."""
        if self._state is IteratorState.FRESH:
            self._begin()
        self._check_usable()
        opened = self._open
        assert opened is not None
        if opened.owner is not None:
            opened.owner.check()
        if self._state is IteratorState.DONE:
            raise StopIteration
        if self._num_steps >= opened.num_batches:
            self._state = IteratorState.DONE
            self._passes.end()
            raise StopIteration
        delivery = self._taken or self._take(opened)
        self._check_usable()  # another thread may have called load_state_dict() while this one waited
        if delivery.failures:
            try:
                self._passes.sample_errors.note(delivery.failures)
            except TooManyErrors as error:
                self._fail(error)
        return delivery

    def _begin(self) -> None:
        had_started = self._passes.has_started
        try:
            opened = self._passes.begin(self)
        except Exception as error:
            # Our own errors and those of the dataset's constructor. Any other error comes from a signal handler, or
            # from the user's warning filter: then this iterator stays fresh.
            if is_interrupt(error) or (had_started and not isinstance(error, SwiftLoaderError)):
                raise
            self._fail(error)
        self._open, self._num_steps = opened, opened.first_step
        self._state = IteratorState.ACTIVE

    def _take(self, opened: OpenEpoch) -> Delivery:
        """Take the next batch from the source, and keep it until it is handed out."""
        self._passes.tune()
        delivery = opened.source.take()
        if delivery.error is not None:
            if delivery.work is None:  # there are no more batches
                self._passes.note_failure(delivery.error)
            self._fail(delivery.error)
        if delivery.num_before != opened.num_before + self._num_steps - opened.first_step:
            self._fail(
                SwiftLoaderError(
                    f"batch {self._num_steps} of epoch {opened.epoch} is lost because a signal handler raised an "
                    f"exception that interrupted the loop while it took the batch. Start a new pass"
                )
            )
        self._taken = delivery
        return delivery

    def __len__(self) -> int:
        """Batches that are still to come, including all of them before the first `next`."""
        total = self._passes.num_batches() if self._open is None else self._open.num_batches
        return total - self._num_steps

    @property
    def is_active(self) -> bool:
        """Whether the pass has begun and may give more batches."""
        return self._state is IteratorState.ACTIVE

    def reopen(self, opened: OpenEpoch) -> None:
        """Continue with another rest of the same epoch, because some of its steps are skipped now."""
        self._open, self._taken = opened, None

    def supersede(self) -> None:
        """End this pass because a newer one has begun."""
        if self._state is IteratorState.ACTIVE:
            self._state = IteratorState.SUPERSEDED

    def _check_usable(self) -> None:
        """Raise if this pass was superseded or has failed."""
        if self._state is IteratorState.SUPERSEDED:
            raise RuntimeError(
                "this iterator can't continue: it was superseded by a newer one of the same loader, or by "
                "load_state_dict() or a new collate_fn. Finish one pass before the next, or make a second loader"
            )
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> NoReturn:
        """End the pass: raise this error, now and from each later `next`."""
        if isinstance(error, StopIteration):  # from the user's code: a collate function, a decoder, a constructor
            stop, error = error, RuntimeError("the user's code raised StopIteration, which would end the epoch early")
            error.__cause__ = stop
        self._state = IteratorState.FAILED
        self._error = error
        self._open = self._taken = None
        raise error

    def __repr__(self) -> str:
        where = f" epoch {self._open.epoch}, {self._num_steps} of {self._open.num_batches}" if self._open else ""
        return f"<EpochIterator {self._state.value}{where}>"
