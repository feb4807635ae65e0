"""How a task of a stage calls the user's function. Each job posts the event that answers its task.

Call, AwaitCall      one result
Step, AwaitStep      one result of a generator, and the generator, to be continued as further work; out of order
Pour, AwaitPour      a relay of a generator's results, filled while the stage takes from it; in order
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swift_loader.executors.base import Outcome
from swift_loader.executors.calls.crew import Post
from swift_loader.executors.calls.event_loop import call_soon
from swift_loader.pipeline.items import Marker
from swift_loader.pipeline.relay import Relay
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.events import Built, Failed
from swift_loader.scheduler.work import IndexWork
from swift_loader.worker.seeding import Fetching, key_this_thread

__all__ = ["AwaitCall", "AwaitPour", "AwaitStep", "Call", "Pour", "Rest", "Step"]

MAX_POURED = 2
"""How many results of one generator may wait for the loop, in order."""


@dataclass(slots=True)
class Rest:
    """A generator that has given some of its results. As a value, it is to be continued."""

    results: Any
    """The iterator."""
    value: Any = None
    """The result that it gave last."""
    is_over: bool = False
    """Whether it has no more results. Then `value` is none of them."""


def _value(task: Send) -> Any:
    assert isinstance(task.work, IndexWork), "a stage hands out items"
    return task.work.indices


def _post_value(task: Send, post: Post, value: Any, began_s: float) -> None:
    post((Built(task.worker, task.generation, task.sequence, Outcome(value), time.perf_counter() - began_s),))


def _post_error(task: Send, post: Post, error: BaseException) -> None:
    post((Failed(task.worker, task.generation, task.sequence, error),))


class Call:
    """Calls a function in a worker thread."""

    def __init__(self, function: Callable[[Any], Any], seed: int) -> None:
        """Call this function. `sample_rng()` in it is keyed by the seed and the item."""
        self._function = function
        self._seed = seed

    def __call__(self, task: Send, post: Post) -> None:
        """Do a task."""
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                key_this_thread(Fetching(self._seed, task.work.epoch // 2, [task.work.step], []))
                value = self._function(value)
        except BaseException as error:  # even SystemExit: the loop raises it
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)


class Step:
    """Takes one result of a generator in a worker thread."""

    def __init__(self, function: Callable[[Any], Iterator[Any]]) -> None:
        self._function = function

    def __call__(self, task: Send, post: Post) -> None:
        """Do a task."""
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                rest = value if isinstance(value, Rest) else Rest(iter(self._function(value)))
                value = _advanced(rest)
        except BaseException as error:
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)


def _advanced(rest: Rest) -> Rest:
    try:
        return Rest(rest.results, next(rest.results))
    except StopIteration:
        return Rest(None, is_over=True)


class Pour:
    """Pours a generator's results into a relay, in a worker thread."""

    def __init__(self, function: Callable[[Any], Iterator[Any]]) -> None:
        self._function = function
        self._relays: dict[int, Relay[Any]] = {}
        """By worker: the one that it fills."""

    def __call__(self, task: Send, post: Post) -> None:
        """Do a task. Returns when all results were poured."""
        value, began_s = _value(task), time.perf_counter()
        if value is Marker.EPOCH_END:
            _post_value(task, post, value, began_s)
            return
        relay = self._relays[task.worker] = Relay(MAX_POURED)
        _post_value(task, post, relay, began_s)
        error: BaseException | None = None
        try:
            for result in self._function(value):
                if not relay.put(result):
                    break
        except BaseException as raised:
            error = raised
        relay.end(error)

    def close(self) -> None:
        """Let no thread wait any more. Any thread. Idempotent."""
        for relay in list(self._relays.values()):
            relay.close()


class AwaitCall:
    """Awaits a coroutine function on an event loop."""

    def __init__(self, function: Callable[[Any], Awaitable[Any]]) -> None:
        self._function = function

    async def __call__(self, task: Send, post: Post) -> None:
        """Do a task."""
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                value = await self._function(value)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)


class AwaitStep:
    """Awaits one result of an async generator on an event loop."""

    def __init__(self, function: Callable[[Any], AsyncIterator[Any]]) -> None:
        self._function = function

    async def __call__(self, task: Send, post: Post) -> None:
        """Do a task."""
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                rest = value if isinstance(value, Rest) else Rest(aiter(self._function(value)))
                value = await _awaited(rest)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)


async def _awaited(rest: Rest) -> Rest:
    try:
        return Rest(rest.results, await anext(rest.results))
    except StopAsyncIteration:
        return Rest(None, is_over=True)


class AwaitPour:
    """Pours an async generator's results into a relay, on an event loop. Waits without blocking the loop."""

    def __init__(self, function: Callable[[Any], AsyncIterator[Any]]) -> None:
        self._function = function

    async def __call__(self, task: Send, post: Post) -> None:
        """Do a task. Returns when all results were poured."""
        value, began_s = _value(task), time.perf_counter()
        if value is Marker.EPOCH_END:
            _post_value(task, post, value, began_s)
            return
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(MAX_POURED)
        poured: Relay[Any] = Relay(MAX_POURED, on_take=lambda: call_soon(loop, room.release))
        _post_value(task, post, poured, began_s)
        error: BaseException | None = None
        try:
            async for result in self._function(value):
                await room.acquire()
                poured.put(result)
        except asyncio.CancelledError:
            poured.end()
            raise
        except BaseException as raised:
            error = raised
        poured.end(error)
