"""The work of a stage: items as they come from upstream.

filling thread ──put──► relay ──next──► scheduler, under the dispatcher's lock
the stage waits in `wait` while there is nothing to do
"""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

from swift_loader.pipeline.items import Item, Marker, Place
from swift_loader.pipeline.relay import Relay
from swift_loader.sampling.permutation import derive_key
from swift_loader.scheduler.work import IndexWork, WorkSource

_MAX_STEP = 2**31 - 1
"""`KeyedSamples` makes 64 bits of it."""


class ItemWork(IndexWork):
    """The work on an item, or the end of an epoch."""

    number: int
    """Which item of its stage it is, from 0. A run that continues begins at 0, too."""
    after: Place
    """Where a run continues after it."""

    @classmethod
    def of(cls, epoch: int, step: int, value: Any, number: int, after: Place) -> ItemWork:
        """Return the work on an item."""
        work = cls(epoch, step, value)
        work.number, work.after = number, after
        return work


class Feed(WorkSource):
    """Items that wait to be worked on. A source of work for a scheduler."""

    def __init__(self, max_items: int, epoch: int, *, puts_back: bool = False) -> None:
        """Begin empty. `max_items`: how many may wait here. `epoch`: of the first items.

        `puts_back`: the stage puts work back, and calls `note_done` at the end of each item.
        """
        self.relay: Relay[ItemWork] = Relay(max_items)
        self._returned: deque[ItemWork] = deque()
        """To be continued, before anything new."""
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._puts_back = puts_back
        self._held: ItemWork | None = None
        """The end of an epoch, until all of its items are done. As `_num_begun`, only `next` writes it."""
        self._num_begun = 0
        self._num_done = 0
        """By the stage's thread. It alone writes this."""
        self._num_items = 0
        self._num_put = 0
        """By the filling thread. It alone writes this."""
        self._num_put_back = 0
        """By the stage's thread. It alone writes this."""
        self._epoch = epoch
        self._is_awaited = False

    @property
    def num_put(self) -> int:
        """How many pieces of work were added."""
        return self._num_put + self._num_put_back

    # The filling thread's side

    def put(self, item: Item) -> bool:
        """Add an item. Blocks while there is no room. Return False if nobody wants it any more."""
        if item.value is Marker.EPOCH_END:
            # An epoch of its own: out of order, it waits for all items before it, and those after it wait for it.
            work = ItemWork.of(2 * self._epoch + 1, 0, item.value, self._num_items, ())
            self._epoch += 1
        else:
            work = ItemWork.of(2 * self._epoch, step_of(item.after), item.value, self._num_items, item.after)
            self._num_items += 1
        self._num_put += 1
        return self.relay.put(work)

    def ring(self) -> None:
        """Wake the stage if it waits. Call it after `put`, once the scheduler was told."""
        if self._is_awaited:
            self._bell.put(None)

    def end(self, error: BaseException | None) -> None:
        """Say that no more items come."""
        self.relay.end(error)
        self._bell.put(None)

    # The stage's side

    def put_back(self, work: ItemWork, value: Any) -> None:
        """Add work that goes on from a result, with this value. It goes first."""
        self._num_put_back += 1
        self._returned.append(ItemWork.of(work.epoch, work.step, value, work.number, work.after))

    def note_done(self) -> None:
        """Record that nothing more comes of an item. The scheduler is to ask again then."""
        self._num_done += 1

    def next(self) -> ItemWork | None:
        """Return the next work; None if there is none now."""
        if self._returned:
            return self._returned.popleft()
        work, self._held = self._held or self.relay.poll(), None
        if work is None or not self._puts_back:
            return work
        if work.indices is not Marker.EPOCH_END:
            self._num_begun += 1
        elif self._num_done < self._num_begun:
            self._held, work = work, None
        return work

    def is_over(self, num_taken: int) -> bool:
        """Return whether nothing more comes after this number of results."""
        return self.relay.is_over and self.num_put == num_taken

    def wait(self, num_taken: int) -> None:
        """Block until there is more work than this number of results, or none comes any more."""
        self._is_awaited = True
        while self.num_put <= num_taken and not self.relay.is_over:
            self._bell.get()
        self._is_awaited = False

    def close(self) -> None:
        """Let nobody wait any more. Any thread. Idempotent."""
        self.relay.is_over = True
        self.relay.close()
        self._bell.put(None)


def step_of(after: Place) -> int:
    """Return a number of 31 bits for the item with this place, by which its draws are keyed."""
    if len(after) == 1 and isinstance(after[0], int) and after[0] <= _MAX_STEP:
        return after[0] - 1
    return derive_key(*_flat(after)) & _MAX_STEP


def _flat(place: Any) -> list[int]:
    return [place] if isinstance(place, int) else [len(place), *(number for part in place for number in _flat(part))]
