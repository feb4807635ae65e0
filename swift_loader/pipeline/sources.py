"""Where items come from: any iterable or async iterable, from any item on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swift_loader.executors.calls.event_loop import call_soon
from swift_loader.pipeline.items import Item, Marker
from swift_loader.pipeline.relay import Relay

__all__ = [
    "SourceStart",
    "SourceStates",
    "check_source",
    "has_state",
    "is_indexed",
    "length_of",
    "source_items",
]

UseLoop = Callable[[], asyncio.AbstractEventLoop]
"""Returns an event loop that runs in another thread."""

STATE_EVERY = 16
"""The source's state is taken before each so many items. The items after it are drawn again on a resume."""

MAX_DRAWN = 16
"""How many items of an async source are drawn ahead."""


def is_indexed(source: Any) -> bool:
    """Return whether items can be had by their numbers, so that continuing is O(1)."""
    if isinstance(source, Sequence):
        return True
    return not hasattr(source, "__iter__") and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def has_state(source: Any) -> bool:
    """Return whether the source can say where it is, and continue there."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def length_of(source: Any) -> int | None:
    """Return the number of items, if the source knows it."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


Where = tuple[int, int]
"""(epoch, number of items before it)."""


class SourceStates:
    """The states of a source at the items that are on their way. The source's thread adds, the loop's removes."""

    def __init__(self) -> None:
        self._states: deque[tuple[Where, Any]] = deque()
        """In the order of the items."""

    def note(self, where: Where, state: Any) -> None:
        """Record the state at an item."""
        self._states.append((where, state))

    def latest(self, where: Where) -> tuple[int, Any] | None:
        """Return the last state that isn't after an item, with its number. Forgets those before it."""
        while len(self._states) > 1 and self._states[1][0] <= where:
            self._states.popleft()
        if not self._states or self._states[0][0] > where or self._states[0][0][0] != where[0]:
            return None
        (_, number), state = self._states[0]
        return number, state

    def __bool__(self) -> bool:
        return bool(self._states)

    def __repr__(self) -> str:
        return f"<SourceStates, {len(self._states)} kept>"


@dataclass(frozen=True, slots=True)
class SourceStart:
    """Where a source begins."""

    num_before: int = 0
    """How many items of the epoch are left out."""
    state: tuple[int, Any] | None = None
    """(number of items before it, what the source's `state_dict` gave there). None: from the beginning."""


def source_items(
    source: Any, start: SourceStart, epoch: int, *, is_endless: bool, states: SourceStates, use_loop: UseLoop
) -> Iterator[Item]:
    """Return the items of a source from an epoch on. With `is_endless`, one epoch after the other."""
    while True:
        yield from _epoch_items(source, start, epoch, states, use_loop)
        epoch += 1
        if has_state(source):
            states.note((epoch, 0), source.state_dict())
        if not is_endless:
            return
        yield Item(Marker.EPOCH_END, ())
        start = SourceStart()


def _epoch_items(
    source: Any, start: SourceStart, epoch: int, states: SourceStates, use_loop: UseLoop
) -> Iterator[Item]:
    if is_indexed(source):
        for number in range(start.num_before, len(source)):
            yield Item(source[number], (number + 1,))
        return
    number = 0
    if start.state is not None:
        number, state = start.state
        source.load_state_dict(state)
    keeps_states = has_state(source)
    values = _drawn(source, use_loop()) if hasattr(source, "__aiter__") else source
    for value in values:
        number += 1
        if number > start.num_before:
            if keeps_states and not (number - start.num_before - 1) % STATE_EVERY:
                states.note((epoch, number), source.state_dict())
            yield Item(value, (number,))


def _drawn(source: Any, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Return the items of an async iterable, drawn by the event loop's thread."""
    room = asyncio.Semaphore(MAX_DRAWN)
    relay: Relay[Any] = Relay(MAX_DRAWN, on_take=lambda: call_soon(loop, room.release))
    drawing = asyncio.run_coroutine_threadsafe(_draw(aiter(source), relay, room), loop)
    try:
        yield from relay
    finally:
        drawing.cancel()


async def _draw(values: AsyncIterator[Any], relay: Relay[Any], room: asyncio.Semaphore) -> None:
    error: BaseException | None = None
    try:
        async for value in values:
            await room.acquire()
            relay.put(value)
    except BaseException as raised:  # even a CancelledError: the source may have raised it by itself
        error = raised
    finally:
        if hasattr(values, "aclose"):
            await values.aclose()
    relay.end(error)


def check_source(source: Any) -> None:
    """Check that items can come from it.

    Raises:
        TypeError: They can't.
    """
    if not (isinstance(source, Iterable) or hasattr(source, "__aiter__") or is_indexed(source)):
        raise TypeError(
            f"the source is a {type(source).__name__}; it must be an iterable, an async iterable, or have "
            f"__getitem__ and __len__"
        )
