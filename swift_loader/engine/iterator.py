"""What the iterators of all loaders have in common: turns of threads, and what an interrupt may leave behind.

Any thread may call `next`. Threads take turns, and each batch goes to one of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any, NoReturn

from swift_loader.engine.engine import Engine
from swift_loader.ranks.ranks import expected_ranks
from swift_loader.runtime import ProcessOwner, is_interrupt
from swift_loader.sampling.progress import Progress
from swift_loader.scheduler.delivery import Delivery


class Turn:
    """One turn after the other, each for one `next` of a loader. It belongs to the thread that holds the lock."""

    def __init__(self) -> None:
        self.begin_in_fork()

    def begin_in_fork(self) -> None:
        """Begin anew, because the thread that may hold the lock doesn't exist in this process."""
        # Reentrant: a signal handler that calls next() while its own thread is in next() gets an error, not a deadlock.
        self.lock = threading.RLock()
        self.is_taken = False
        """Whether the thread that holds the lock is within `next`."""
        self.pid = os.getpid()


class IteratorState(Enum):
    """FRESH ─first next─► ACTIVE ─► DONE or FAILED, or SUPERSEDED by an iterator that began later.

    A close may come in each. With persistent workers, a DataLoader's only iterator is FRESH again with each epoch.
    """

    FRESH = "fresh"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class LoopIterator(Iterator[Any]):
    """Hands out the batches of one pass, each once. A batch counts when `next` returns it.

    An exception of a signal handler may come at any point. Then it comes out of `next`, and the next call seeks: it
    goes on with the batch that the loop hasn't got. Only if it has ended a mere wait, nothing has changed.
    """

    _progress: Progress
    """How far the loop is. Known once the pass has begun."""
    _engine: Engine | None = None
    """What batches come from. None: they come from several, or from none."""
    _owner: ProcessOwner | None = None
    """The only process that may continue the pass. None: forks may too, because they have a copy of everything."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._state = IteratorState.FRESH
        """Any thread may end the pass."""
        self._error: BaseException | None = None
        """Why the pass has failed or was superseded."""
        self._is_dirty = False
        """Whether `next` is at what can't be done twice, or an exception has ended it there."""

    def _begin(self) -> None:
        """Begin the pass: be ACTIVE, or raise."""
        raise NotImplementedError

    def _seek(self) -> None:
        """Go on where the loop is, with nothing in flight that an exception may have left half done."""
        raise NotImplementedError

    def _take(self) -> Delivery:
        """Return the next batch, the error in its place, or the end.

        What it raises says nothing about the batch, unless it has ended the pass first.
        """
        raise NotImplementedError

    def _give(self, delivery: Delivery) -> NoReturn:
        """Raise the error in a batch's place."""
        raise NotImplementedError

    def _end(self) -> None:
        """Take in that the loop has met the end. Raises what there is to say then."""
        raise NotImplementedError

    def _advance(self) -> Delivery:
        """Return the next batch. Raises what comes in its place."""
        if self._state is not IteratorState.ACTIVE:
            self._check_usable()
            self._begin()
        engine = self._engine
        self._progress.settle()
        if self._progress.is_over:
            self._end()
            raise StopIteration
        if self._owner is not None and self._owner.pid != self._turn.pid:
            self._owner.check()
        if self._is_dirty or (engine is not None and engine.is_dirty):
            self._seek()
        self._is_dirty = True
        delivery = self._take()
        if self._state is not IteratorState.ACTIVE:  # another thread has ended the pass meanwhile
            self._check_usable()
        if delivery.error is not None:
            self._give(delivery)
        if delivery.is_end:
            self._is_dirty = False
            self._end()
            raise StopIteration
        if delivery.lease is not None:
            delivery.lease.keep()
        return delivery

    def _check_usable(self) -> None:
        """Raise if this pass is over, was superseded or has failed."""
        if self._error is not None:
            raise self._error
        if self._state is IteratorState.DONE:
            raise StopIteration

    def _stop(self, state: IteratorState, error: BaseException | None = None) -> None:
        """Be in this state. Unless it is FRESH, each later `next` raises the error, or `StopIteration`. Any thread."""
        # No handler runs between these.
        self._error = error
        self._state = state
        self._is_dirty = False

    def _fail(self, error: BaseException) -> NoReturn:
        """End the pass: raise this error, now and from each later `next`."""
        if isinstance(error, StopIteration):  # from the user's code: a collate function, a decoder, a constructor
            stop, error = error, RuntimeError("the user's code raised StopIteration, which would end the epoch early")
            error.__cause__ = stop
        self._stop(IteratorState.FAILED, error)
        raise error

    def __next__(self) -> Any:
        turn, taken, batch = self._turn, None, None
        if turn.pid != os.getpid():
            turn.begin_in_fork()
        try:
            with turn.lock:
                if turn.is_taken:
                    raise RuntimeError(
                        "next() was called while this thread is already within next() of the same loader, by a signal "
                        "handler or by code that builds or decodes a batch. Call next() in the training loop only"
                    )
                turn.is_taken = True
                try:
                    taken = self._advance()
                    # No handler runs between these.
                    batch, taken.batch = taken.batch, None
                    self._progress.got = taken
                    self._is_dirty = False
                except BaseException:
                    engine = self._engine
                    if taken is None and engine is not None and engine.note_wait():
                        self._is_dirty = False
                    raise
                finally:
                    turn.is_taken = False
        except BaseException:
            if taken is not None:  # the loop doesn't get it, whether or not it counts already
                # No handler runs between these.
                taken.batch = batch if taken.batch is None else taken.batch
                self._progress.got = None
                self._is_dirty = True
            raise
        return batch


class ShownIterator(LoopIterator):
    """Shows a bar of the epoch's batches, on rank 0. It is in front of another iterator's class.

    It draws before it takes a batch, so an interrupt of the drawing loses none. A bar without references closes itself.
    """

    _bar: Any = None
    _unit = "batch"
    _began_s = _waited_s = 0.0
    """When the bar began, and how long the loop has waited since."""

    def _place(self) -> tuple[int, int, int | None, int]:
        """Return the epoch, how many batches of it the loop got, of how many (None: unknown), and the rank.

        Before the first batch, this begins the epoch if that is needed to know them.
        """
        raise NotImplementedError

    def _advance(self) -> Any:
        asked_s, bar, (epoch, num_done, num_batches, rank) = time.perf_counter(), self._bar, self._place()
        with self._drawing():
            if bar is None:
                shown: dict[str, Any] = {"desc": f"epoch {epoch}", "initial": num_done, "unit": self._unit}
                is_hidden = bool(rank or expected_ranks(None).rank)
                self._bar = _bar_class()(total=num_batches, mininterval=0.25, miniters=1, disable=is_hidden, **shown)
            else:
                bar.set_postfix_str(f"{self._waited_s / (asked_s - self._began_s):.0%} waiting for data", refresh=False)
                bar.update(num_done - bar.n)
        try:
            taken, now_s = super()._advance(), time.perf_counter()
        except BaseException:
            with self._drawing():
                self._bar.close()
            raise
        self._waited_s += now_s - asked_s
        if bar is None:  # the wait for the first batch doesn't count
            self._began_s, self._waited_s = now_s, 0.0
        return taken

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Go on without a bar if the block can't draw it: stderr may be None, closed, or a pipe that nobody reads."""
        try:
            yield
        except Exception as error:
            if is_interrupt(error):
                raise
            self._bar = _bar_class()(disable=True)


@cache
def _bar_class() -> Any:
    """Return tqdm's bar, without its thread, and without its lock, which would fix the program's start method."""
    from tqdm.auto import tqdm

    return type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": threading.RLock(), "disable": True})
