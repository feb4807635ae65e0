"""What the iterators of all loaders have in common: turns of threads, and what an interrupt may leave behind.

Any thread may call `next`. Threads take turns, and each batch goes to one of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from swift_loader.ranks.ranks import expected_ranks
from swift_loader.runtime import is_interrupt


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


class LoopIterator(Iterator[Any]):
    """Hands out each batch once. It counts when `next` returns it.

    An exception of a signal handler may come at any point. Then it comes out of `next`, and the next call seeks: it
    goes on with the batch that the loop hasn't got.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def _advance(self) -> Any:
        """Return what has the next `batch`. Raises what comes in its place.

        It is dirty while it is at what can't be done twice. If it is dirty when it is called, it seeks first.
        """
        raise NotImplementedError

    def _note(self, taken: Any) -> None:
        """Count a batch: the loop gets it. Nothing is dirty any more."""
        raise NotImplementedError

    def _take_back(self, taken: Any) -> None:
        """Count a batch as not delivered, whether or not it was counted. Be dirty."""
        raise NotImplementedError

    def _note_exception(self) -> None:
        """Take in that an exception comes out of `_advance`. If it has ended a mere wait, nothing is dirty."""

    def __next__(self) -> Any:
        turn, taken = self._turn, None
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
                    batch = taken.batch
                    self._note(taken)
                except BaseException:
                    if taken is None:
                        self._note_exception()
                    raise
                finally:
                    turn.is_taken = False
        except BaseException:
            if taken is not None:
                try:
                    self._take_back(taken)
                except BaseException:  # of another handler, which Python runs as a call begins
                    self._take_back(taken)
                    raise
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
