"""How a task of a stage calls the user's function. Each job posts the event that answers its task.

Call, AwaitCall      one result
Step, AwaitStep      one result of a generator, and the generator, to be continued as further work; out of order
Pour, AwaitPour      a relay of a generator's results, filled while the stage takes from it; in order
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import CoroutineType
from typing import Any

from swift_loader.errors import WorkerStalled
from swift_loader.executors.base import Outcome
from swift_loader.executors.calls.crew import Post
from swift_loader.executors.calls.event_loop import call_soon
from swift_loader.pipeline.items import Marker
from swift_loader.pipeline.relay import Relay
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.events import Built, Failed
from swift_loader.scheduler.work import IndexWork
from swift_loader.worker.keyed_samples import POSITION_BITS
from swift_loader.worker.seeding import Fetching, key_this_thread

__all__ = ["AwaitCall", "AwaitPour", "AwaitStep", "Call", "Pour", "Rest", "Step"]

MAX_POURED = 2
"""How many results of one generator may wait for the loop, in order."""


@dataclass(slots=True)
class Rest:
    """A generator that has given some of its results. As a value, it is to be continued."""

    results: Any
    """The iterator."""
    fetching: Fetching | None = None
    """Keys `sample_rng()` in it."""
    value: Any = None
    """The result that it gave last."""
    is_over: bool = False
    """Whether it has no more results. Then `value` is none of them."""


def _value(task: Send) -> Any:
    assert isinstance(task.work, IndexWork), "a stage hands out items"
    return task.work.indices


def _fetching(task: Send, seed: int) -> Fetching:
    return Fetching(seed, task.work.epoch, [task.work.step << POSITION_BITS], [])  # as in worker processes


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
                key_this_thread(_fetching(task, self._seed))
                value = self._function(value)
                if isinstance(value, CoroutineType):
                    raise _unawaited(value)
        except BaseException as error:  # even SystemExit: the loop raises it
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)


class Step:
    """Takes one result of a generator in a worker thread."""

    def __init__(self, function: Callable[[Any], Iterator[Any]], seed: int) -> None:
        """Run this generator. `sample_rng()` in it is keyed by the seed and the item."""
        self._function = function
        self._seed = seed

    def __call__(self, task: Send, post: Post) -> None:
        """Do a task."""
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                rest = value if isinstance(value, Rest) else None
                fetching = _fetching(task, self._seed) if rest is None else rest.fetching
                assert fetching is not None, "a thread began it"
                key_this_thread(fetching)
                value = _advanced(rest or Rest(iter(self._function(value)), fetching))
        except BaseException as error:
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)


def _advanced(rest: Rest) -> Rest:
    try:
        return Rest(rest.results, rest.fetching, next(rest.results))
    except StopIteration:
        return Rest(None, is_over=True)


class Pour:
    """Pours a generator's results into a relay, in a worker thread."""

    def __init__(self, function: Callable[[Any], Iterator[Any]], seed: int, timeout_s: float | None, name: str) -> None:
        """Run this generator.

        Args:
            function: `sample_rng()` in it is keyed by the seed and the item.
            seed: Of what it draws.
            timeout_s: How long the stage waits for a result; None: no limit.
            name: Of the stage, for errors.
        """
        self._function = function
        self._seed = seed
        self._new_relay = _relays(timeout_s, name)
        self._relays: dict[int, Relay[Any]] = {}
        """By worker: the one that it fills."""
        self._closed = threading.Event()

    def __call__(self, task: Send, post: Post) -> None:
        """Do a task. Returns when all results were poured."""
        value, began_s = _value(task), time.perf_counter()
        if value is Marker.EPOCH_END:
            _post_value(task, post, value, began_s)
            return
        relay = self._relays[task.worker] = self._new_relay(None)
        if self._closed.is_set():  # `close` may not have seen this one
            return
        _post_value(task, post, relay, began_s)
        error: BaseException | None = None
        try:
            key_this_thread(_fetching(task, self._seed))
            for result in self._function(value):
                if not relay.put(result):
                    break
        except BaseException as raised:
            error = raised
        relay.end(error)

    def close(self) -> None:
        """Let no thread wait for room any more. Any thread. Idempotent."""
        self._closed.set()
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
        except BaseException as error:  # even a CancelledError: the function may have raised it by itself
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
        except BaseException as error:  # even a CancelledError: the function may have raised it by itself
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)


async def _awaited(rest: Rest) -> Rest:
    try:
        return Rest(rest.results, None, await anext(rest.results))
    except StopAsyncIteration:
        return Rest(None, is_over=True)


class AwaitPour:
    """Pours an async generator's results into a relay, on an event loop. Waits without blocking the loop."""

    def __init__(self, function: Callable[[Any], AsyncIterator[Any]], timeout_s: float | None, name: str) -> None:
        """Run this generator. See `Pour` for the arguments."""
        self._function = function
        self._new_relay = _relays(timeout_s, name)

    async def __call__(self, task: Send, post: Post) -> None:
        """Do a task. Returns when all results were poured."""
        value, began_s = _value(task), time.perf_counter()
        if value is Marker.EPOCH_END:
            _post_value(task, post, value, began_s)
            return
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(MAX_POURED)
        poured = self._new_relay(lambda: call_soon(loop, room.release))
        _post_value(task, post, poured, began_s)
        error: BaseException | None = None
        try:
            async with contextlib.aclosing(_with_aclose(self._function(value))) as results:
                async for result in results:
                    await room.acquire()
                    poured.put(result)
        except BaseException as raised:  # even a CancelledError, as in `AwaitCall`
            error = raised
        poured.end(error)


def _unawaited(value: CoroutineType[Any, Any, Any]) -> TypeError:
    value.close()
    return TypeError(
        f"the function returned a coroutine, {value.__qualname__}, but isn't a coroutine function itself; give that "
        f"function, with functools.partial for its other arguments"
    )


def _relays(timeout_s: float | None, name: str) -> Callable[[Callable[[], None] | None], Relay[Any]]:
    """Return what makes relays for a stage. It takes what is called after each take."""

    def stalled() -> BaseException:
        return WorkerStalled(f"stage {name!r}: a generator gave no result within timeout={timeout_s:g} s")

    return lambda on_take: Relay(MAX_POURED, timeout_s=timeout_s, on_timeout=stalled, on_take=on_take)


def _with_aclose(results: AsyncIterator[Any]) -> Any:
    """Return an async generator for any async iterator, so that it can be closed."""
    if hasattr(results, "aclose"):
        return results

    async def passed() -> AsyncIterator[Any]:
        async for result in results:
            yield result

    return passed()
