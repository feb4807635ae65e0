"""Copies batches of an iterator to the device ahead of the loop. Runs in the loop's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from swift_loader.device.copies import Copies, Issued
from swift_loader.device.transfer import Transfer

__all__ = ["End", "Lookahead", "Moved"]


@dataclass(frozen=True, slots=True)
class Moved:
    """A batch on the device."""

    issued: Issued
    state: Any
    """The source's state after this batch."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the source."""

    state: Any


class Lookahead:
    """The batches that were moved and not taken yet. An error or the end stays at the front.

    The source may write all its batches into the same memory. So it isn't asked for the next batch before the copies of
    the last one are over. Tensors of the source that are on the device already are copied on the loop's stream.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        move: Callable[[int, Any, Transfer], Any],
        snapshot: Callable[[], Any],
        copies: Copies,
        depth: int,
    ) -> None:
        """Begin a pass.

        Args:
            batches: The source's iterator.
            move: Takes the batch's number in the pass and the batch. Returns the batch on the device. It shares no
                memory with the source.
            snapshot: Returns the source's state.
            copies: The running copies of all passes.
            depth: How many batches may be on the device ahead of the loop.
        """
        self._batches = batches
        self._move = move
        self._snapshot = snapshot
        self._copies = copies
        self._depth = depth
        self._num_pulled = 0
        self._pulled: tuple[Any, Any] | None = None
        """A batch and the state after it, not moved yet because of a Ctrl-C."""
        self._queue: deque[Moved | End | Exception] = deque()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to take."""
        return bool(self._queue) and not isinstance(self._queue[0], Moved)

    def take(self) -> Moved | End:
        """Return the next batch or the end. Raise an error in place of its batch."""
        self._copies.begin_step()
        while len(self._queue) <= self._depth and (not self._queue or isinstance(self._queue[-1], Moved)):
            self._queue.append(self._fetch())
        first = self._queue[0]
        if isinstance(first, Exception):
            raise first
        if isinstance(first, Moved):
            self._copies.hand_over(first.issued)
            self._queue.popleft()  # last: a Ctrl-C before it loses nothing
        return first

    def abandon(self, what: str) -> None:
        """Drop the batches. Each later `take` raises an error."""
        self._queue.clear()
        self._queue.append(RuntimeError(f"this iterator was ended by {what}; begin a new one"))

    def _fetch(self) -> Moved | End | Exception:
        try:
            if self._pulled is None:
                self._copies.wait()
                try:
                    batch = next(self._batches)
                except StopIteration:
                    return End(self._snapshot())
                self._pulled = batch, self._snapshot()
                self._num_pulled += 1
            batch, state = self._pulled
            issued = self._copies.issue(partial(self._move, self._num_pulled - 1), batch)
            fetched: Moved | Exception = Moved(issued, state)
        except StopIteration as stop:
            fetched = RuntimeError("to_device raised StopIteration, which would end the pass early")
            fetched.__cause__ = stop
        except Exception as error:
            fetched = error
        self._pulled = None  # not after a Ctrl-C: the next call moves it
        return fetched

    def __repr__(self) -> str:
        return f"{len(self._queue)} ahead"
