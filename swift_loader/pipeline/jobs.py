"""How a task of a stage calls the user's function. Each job posts the event that answers its task.

called, on_loop          one result
stepped, awaited_step    one result of a generator, and the generator, to be continued as further work; out of order
Pour, AwaitPour          a relay of a generator's results, filled while the stage takes from it; in order
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swift_loader.errors import WorkerStalled
from swift_loader.executors.calls import call_soon
from swift_loader.executors.crew import Post
from swift_loader.pipeline.functions import awaited
from swift_loader.pipeline.items import Marker
from swift_loader.pipeline.relay import Relay
from swift_loader.scheduler.messages import Answered, Send
from swift_loader.scheduler.work import IndexWork
from swift_loader.worker.fetch import POSITION_BITS
from swift_loader.worker.seeding import Fetching, key_this_thread

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
    build_s = time.perf_counter() - began_s
    post((Answered(task.worker, task.generation, task.sequence, value, build_s=build_s),))


def _post_error(task: Send, post: Post, error: BaseException) -> None:
    post((Answered(task.worker, task.generation, task.sequence, error=error),))


def in_thread(compute: Callable[[Send, Any], Any]) -> Callable[[Send, Post], None]:
    """Return a job of a worker thread: it answers each task with what `compute` returns for it and its item."""

    def do(task: Send, post: Post) -> None:
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                value = compute(task, value)
        except BaseException as error:  # even SystemExit: the loop raises it
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)

    return do


def on_loop(compute: Callable[[Any], Awaitable[Any]]) -> Callable[[Send, Post], Awaitable[None]]:
    """Return the same for an event loop: it answers with what `compute` gives for an item."""

    async def do(task: Send, post: Post) -> None:
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                value = await compute(value)
        except BaseException as error:  # even a CancelledError: the function may have raised it by itself
            _post_error(task, post, error)
        else:
            _post_value(task, post, value, began_s)

    return do


def called(function: Callable[[Any], Any], seed: int) -> Callable[[Send, Post], None]:
    """Return a job that calls a function. `sample_rng()` in it is keyed by the seed and the item."""

    def compute(task: Send, value: Any) -> Any:
        key_this_thread(_fetching(task, seed))
        return awaited(function(value))

    return in_thread(compute)


def stepped(function: Callable[[Any], Iterator[Any]], seed: int) -> Callable[[Send, Post], None]:
    """Return a job that takes one result of a generator. `sample_rng()` in it is keyed by the seed and the item."""

    def compute(task: Send, value: Any) -> Rest:
        rest = value if isinstance(value, Rest) else None
        fetching = _fetching(task, seed) if rest is None else rest.fetching
        assert fetching is not None, "a thread began it"
        key_this_thread(fetching)
        results = iter(function(value)) if rest is None else rest.results
        try:
            return Rest(results, fetching, next(results))
        except StopIteration:
            return Rest(None, is_over=True)

    return in_thread(compute)


def awaited_step(function: Callable[[Any], AsyncIterator[Any]]) -> Callable[[Send, Post], Awaitable[None]]:
    """Return a job that awaits one result of an async generator."""

    async def compute(value: Any) -> Rest:
        results = value.results if isinstance(value, Rest) else aiter(function(value))
        try:
            return Rest(results, None, await anext(results))
        except StopAsyncIteration:
            return Rest(None, is_over=True)

    return on_loop(compute)


class Pour:
    """Pours a generator's results into a relay, in a worker thread."""

    def __init__(self, function: Callable[[Any], Iterator[Any]], seed: int, timeout_s: float | None, name: str) -> None:
        """Run this generator. `sample_rng()` in it is keyed by the seed and the item.

        `timeout_s`: how long the stage waits for a result; None: no limit. `name`: of the stage, for errors.
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
                full_s = time.perf_counter()
                if not relay.put(result):
                    break
                began_s += time.perf_counter() - full_s
        except BaseException as raised:
            error = raised
        relay.busy_s = time.perf_counter() - began_s
        relay.end(error)

    def close(self) -> None:
        """Let no thread wait for room any more. Any thread. Idempotent."""
        self._closed.set()
        for relay in list(self._relays.values()):
            relay.close()


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
                    full_s = time.perf_counter()
                    await room.acquire()
                    began_s += time.perf_counter() - full_s
                    poured.put(result)
        except BaseException as raised:  # even a CancelledError, as in `on_loop`
            error = raised
        poured.busy_s = time.perf_counter() - began_s
        poured.end(error)


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
