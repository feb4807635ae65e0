"""Where items come from: any iterable or async iterable, from any item on."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from swift_loader.executors.calls import call_soon
from swift_loader.pipeline.items import Item, Marker
from swift_loader.pipeline.relay import Relay
from swift_loader.worker.stream import is_stateful

if TYPE_CHECKING:
    from swift_loader.pipeline.run import Run

_NOTHING = object()

UseLoop = Callable[[], asyncio.AbstractEventLoop]
"""Returns an event loop that runs in another thread."""

STATE_EVERY = 16
"""The source's state is taken before each so many items. The items after it are drawn again on a resume."""

MAX_DRAWN = 16
"""How many items of an async source are drawn ahead."""

MAX_STATES = 1024
"""How many states are kept. Only a stage that restarts with the epoch, as `shuffle`, needs items from that far back."""


def is_indexed(source: Any) -> bool:
    """Return whether items can be had by their numbers, so that continuing is O(1)."""
    if isinstance(source, Sequence):
        return True
    return not hasattr(source, "__iter__") and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def state_of(source: Any) -> Any:
    """Return the source's state, which stays as it is now."""
    return copy.deepcopy(source.state_dict())


def length_of(source: Any) -> int | None:
    """Return the number of items, if the source knows it."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


Where = tuple[int, int]
"""(epoch, number of items before it)."""

SourceBegin = tuple[int, Any]
"""(number of items before it, what the source's `state_dict` gave there)."""


class SourceStates:
    """The states of a source at the items that are on their way. The source's thread adds, the loop's removes."""

    def __init__(self) -> None:
        self._states: deque[tuple[Where, Any]] = deque()
        """In the order of the items."""

    def note(self, where: Where, state: Any) -> None:
        """Record the state at an item."""
        self._states.append((where, state))
        if len(self._states) > MAX_STATES:
            self._states = deque([*self._states][::2])  # with fewer of them, more items are drawn again

    def latest(self, where: Where) -> SourceBegin | None:
        """Return the last state that isn't after an item, with its number. Forgets those before it."""
        states = self._states  # the other thread may replace it
        while len(states) > 1 and states[1][0] <= where:
            states.popleft()
        if not states or states[0][0] > where or states[0][0][0] != where[0]:
            return None
        (_, number), state = states[0]
        return number, state

    def __bool__(self) -> bool:
        return bool(self._states)


def source_items(
    source: Any,
    num_before: int,
    begin: SourceBegin | None,
    run: Run,
    states: SourceStates,
    *,
    is_endless: bool,
) -> Iterator[Item]:
    """Return the items of a source from an epoch on.

    `source`: see `check_source`. `num_before`: how many items of the first epoch are left out. `begin`: the source's
    state somewhere before; None: it begins at the beginning. `run` has the first epoch, the event loop for async
    sources, and whether the source is told each epoch after the first one. `states` get the source's states.
    `is_endless`: one epoch comes after the other.
    """
    epoch = run.epoch
    while True:
        yield from _epoch_items(source, num_before, begin, epoch, states, run.loop)
        epoch += 1
        if run.tells_epochs and is_endless and hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        if is_stateful(source):
            states.note((epoch, 0), state_of(source))
        if not is_endless:
            return
        yield Item(Marker.EPOCH_END, ())
        num_before, begin = 0, None


def _epoch_items(
    source: Any, num_before: int, begin: SourceBegin | None, epoch: int, states: SourceStates, use_loop: UseLoop
) -> Iterator[Item]:
    if is_indexed(source):
        for number in range(num_before, len(source)):
            yield Item(source[number], (number + 1,))
        return
    num_drawn = 0
    if begin is not None:
        num_drawn, state = begin
        source.load_state_dict(state)
    says_place = is_stateful(source) and getattr(source, "is_exact", True)
    taker = _StateTaker(source, epoch, num_drawn, num_before, states) if says_place else None
    values = _pulled(source, taker, use_loop)
    if begin is not None and not num_drawn:  # the source gave that state between two epochs
        first = next(values, _NOTHING)
        # Some begin the next epoch with it; others say that nothing is left, and begin it with the next pass.
        values = _pulled(source, taker, use_loop) if first is _NOTHING else itertools.chain([first], values)
    try:
        for number, value in enumerate(values, num_drawn + 1):
            if number > num_before:
                yield Item(value, (number,))
    finally:
        if isinstance(source, GeneratorType):  # else it ends when its references do
            source.close()


class _StateTaker:
    """Takes the state of a source after some of its items, on the thread that draws them."""

    def __init__(self, source: Any, epoch: int, number: int, num_before: int, states: SourceStates) -> None:
        self._source = source
        self._epoch = epoch
        self._number = number
        """How many items were drawn."""
        self._num_before = num_before
        """How many of them are left out."""
        self._states = states

    def note_drawn(self) -> None:
        """Count an item, and take the state behind it if it is time to."""
        self._number += 1
        num_new = self._number - self._num_before
        if num_new > 0 and not (num_new - 1) % STATE_EVERY:
            self._states.note((self._epoch, self._number), state_of(self._source))


def _pulled(source: Any, taker: _StateTaker | None, use_loop: UseLoop) -> Iterator[Any]:
    """Return the items of one pass over a source."""
    if hasattr(source, "__aiter__"):
        return _drawn(source, taker, use_loop())
    return iter(source) if taker is None else _noted(source, taker)


def _noted(source: Any, taker: _StateTaker) -> Iterator[Any]:
    for value in source:
        taker.note_drawn()
        yield value


def _drawn(source: Any, taker: _StateTaker | None, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Return the items of an async iterable, drawn by the event loop's thread."""
    room = asyncio.Semaphore(MAX_DRAWN)
    relay: Relay[Any] = Relay(MAX_DRAWN, on_take=lambda: call_soon(loop, room.release))
    drawing = asyncio.run_coroutine_threadsafe(_draw(aiter(source), taker, relay, room), loop)
    try:
        yield from relay
    finally:
        drawing.cancel()


async def _draw(
    values: AsyncIterator[Any], taker: _StateTaker | None, relay: Relay[Any], room: asyncio.Semaphore
) -> None:
    error: BaseException | None = None
    try:
        async for value in values:
            if taker is not None:
                taker.note_drawn()  # now: the source will be ahead of what is taken out of the relay
            await room.acquire()
            relay.put(value)
    except BaseException as raised:  # even a CancelledError: the source may have raised it by itself
        error = raised
    finally:
        if hasattr(values, "aclose"):
            await values.aclose()
    relay.end(error)


def check_source(source: Any) -> None:
    """Check that items can come from it. Raises `TypeError` if they can't."""
    if not (isinstance(source, Iterable) or hasattr(source, "__aiter__") or is_indexed(source)):
        raise TypeError(
            f"the source is a {type(source).__name__}; it must be an iterable, an async iterable, or have "
            f"__getitem__ and __len__"
        )
