"""What kind of function the user gave to a stage, and how a task of the stage calls it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from types import CoroutineType, FunctionType, GeneratorType
from typing import Any

from swift_loader.executors.calls import call_soon
from swift_loader.executors.crew import CrewWorker
from swift_loader.pipeline.stage import LoopRelay, Marker, Relay, RelayStage, RestStage, Stage, StartedGenerator
from swift_loader.sampling.work import IndexWork
from swift_loader.scheduler.messages import Answered, Send
from swift_loader.worker.fetch import POSITION_BITS
from swift_loader.worker.mapped import Sleep, retried, run_now, sleep_here
from swift_loader.worker.seeding import Fetching, key_this_thread


class Kind(Enum):
    """How a function gives its results."""

    FUNCTION = "function"
    """Returns one."""
    GENERATOR = "generator"
    """Yields any number of them."""
    COROUTINE = "coroutine"
    """Returns one, on an event loop."""
    ASYNC_GENERATOR = "async generator"
    """Yields any number of them, on an event loop."""

    @property
    def is_async(self) -> bool:
        """Whether it runs on an event loop."""
        return self in (Kind.COROUTINE, Kind.ASYNC_GENERATOR)

    @property
    def is_generator(self) -> bool:
        """Whether it gives any number of results for an item."""
        return self in (Kind.GENERATOR, Kind.ASYNC_GENERATOR)


@dataclass(frozen=True)
class Function:
    """What a stage calls with each item."""

    call: Callable[..., Any]
    kind: Kind
    name: str
    """For errors and pictures."""

    @classmethod
    def of(cls, given: Any, name: str | None = None) -> Function:
        """Return a function for what the user gave to a stage: a callable, or a dict or list to look items up in.

        Raises `TypeError` if it is neither.
        """
        call, kind = given, kind_of(given)
        if not callable(given):
            if not hasattr(given, "__getitem__"):
                raise TypeError(f"a stage needs a function, but {given!r} can't be called")
            call = functools.partial(operator.getitem, given)
        elif inspect.isfunction(given) and kind is Kind.FUNCTION and kind_of(inspect.unwrap(given)) is Kind.GENERATOR:
            call, kind = functools.partial(_results_of, given), Kind.GENERATOR
        return cls(call, kind, name or name_of(given))


def _results_of(function: FunctionType, item: Any) -> Iterator[Any]:
    """Yield what a decorated generator gives: its results, or the one that the decorator has made of them."""
    result = function(item)
    yield from result if isinstance(result, GeneratorType) else (result,)


@dataclass(frozen=True)
class Submitted:
    """A coroutine function that has an executor of `concurrent.futures` call a plain one."""

    function: Function
    executor: Executor

    async def __call__(self, item: Any) -> Any:
        """Return the result. If this is cancelled, a call that waits in the executor's queue is, too."""
        call, loop, done = self.executor.submit(self.function.call, item), asyncio.get_running_loop(), asyncio.Event()
        call.add_done_callback(lambda _: call_soon(loop, done.set))
        try:
            await done.wait()  # `wrap_future` never returns after a StopIteration
        finally:
            call.cancel()
        return awaited(call.result())

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"stage {self.function.name!r} has executor={self.executor!r}, which can't be pickled or copied; make the "
            f"pipeline where it runs, or give on='thread' or 'process'"
        )


@dataclass(frozen=True)
class Retried:
    """Calls a function again that raises. Its waits are those of `mapped`."""

    call: Callable[[Any], Any]
    retries: int

    def __call__(self, item: Any) -> Any:
        """Return the function's result."""
        return run_now(self._call(item, sleep_here))

    async def _call(self, item: Any, sleep: Sleep) -> Any:
        async def attempt() -> Any:
            result = self.call(item)
            return await result if sleep is asyncio.sleep else awaited(result)

        return await retried(attempt, self.retries, "do it", sleep, [])


class RetriedCoroutine(Retried):
    """The same for a coroutine function."""

    async def __call__(self, item: Any) -> Any:
        """Return the function's result."""
        return await self._call(item, asyncio.sleep)


def awaited(result: Any) -> Any:
    """Return what a plain function gave. Raises `TypeError` if it is a coroutine."""
    if not isinstance(result, CoroutineType):
        return result
    result.close()
    raise TypeError(
        f"the function returned a coroutine, {result.__qualname__}, but isn't a coroutine function itself; give that "
        f"function, with functools.partial for its other arguments"
    )


def kind_of(function: object) -> Kind:
    """Return the kind of a function, a method, a partial or an object with `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = getattr(function, "__call__", function)  # noqa: B004 - its own, not whether it has one
    if inspect.isasyncgenfunction(function):
        return Kind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(function):
        return Kind.COROUTINE
    return Kind.GENERATOR if inspect.isgeneratorfunction(function) else Kind.FUNCTION


def name_of(function: object) -> str:
    """Return the name of a function for errors and pictures."""
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__name__", None) or type(function).__name__
    return name


# How a task of a stage calls the function. Each job posts the event that answers its task.

MAX_POURED = 2
"""How many results of one generator may wait for the loop, in order."""


class FunctionJob:
    """Answers tasks with what a function returns for an item, in worker threads.

    `sample_rng()` in the function is keyed by the seed and the item.
    """

    stage: type[Stage] = Stage
    """What takes its answers."""

    def __init__(self, function: Function, seed: int, timeout_s: float | None) -> None:
        """Call this function. `timeout_s`: how long the stage waits for a generator's result; None: no limit."""
        self._function = function.call
        self._seed = seed
        self._relay_options: dict[str, Any] = {
            "timeout_s": timeout_s,
            "late": f"stage {function.name!r}: a generator gave no result",
        }

    def __call__(self, task: Send, worker: CrewWorker) -> Any:
        """Do a task. It catches all that the function raises."""
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                value = self._answer(task, value)
        except BaseException as error:  # even SystemExit: the loop raises it
            _post(task, worker, error=error)
        else:
            _post(task, worker, value, build_s=time.perf_counter() - began_s)
            if isinstance(value, Relay):
                value.pour()

    def _answer(self, task: Send, value: Any) -> Any:
        self._key(task)
        return awaited(self._function(value))

    def _key(self, task: Send) -> Fetching:
        """Key `sample_rng()` in this thread, as in worker processes."""
        fetching = Fetching(self._seed, task.work.epoch, [task.work.step << POSITION_BITS], [])
        key_this_thread(fetching)
        return fetching

    def stop(self) -> None:
        """Let no thread wait for room any more. Any thread. Idempotent."""


class Step(FunctionJob):
    """Takes one result of a generator."""

    stage = RestStage

    def _answer(self, task: Send, value: Any) -> StartedGenerator:
        if isinstance(value, StartedGenerator):
            key_this_thread(value.fetching)
            rest = value
        else:
            fetching = self._key(task)
            rest = StartedGenerator(iter(self._function(value)), fetching)
        try:
            return StartedGenerator(rest.results, rest.fetching, next(rest.results))
        except StopIteration:
            return StartedGenerator(None, is_over=True)


class Pour(FunctionJob):
    """Pours a generator's results into a relay."""

    stage = RelayStage

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._relays: dict[int, Relay[Any]] = {}
        """By worker: the one that it fills."""
        self._is_stopped = False

    def _answer(self, task: Send, value: Any) -> Relay[Any]:
        self._key(task)
        relay = self._relays[task.worker] = Relay(MAX_POURED, **self._relay_options)
        relay.source = self._function(value)
        if self._is_stopped:  # `stop` may not have seen this one
            relay.stop()
        return relay

    def stop(self) -> None:
        """Let no thread wait for room any more. Any thread. Idempotent."""
        self._is_stopped = True
        for relay in list(self._relays.values()):
            relay.stop()


class AwaitedJob(FunctionJob):
    """The same as `FunctionJob` for a coroutine function, on an event loop. Nothing is keyed."""

    async def __call__(self, task: Send, worker: CrewWorker) -> None:
        """Do a task. It catches all that the function raises."""
        value, began_s = _value(task), time.perf_counter()
        try:
            if value is not Marker.EPOCH_END:
                value = await self._awaited_answer(value)
        except BaseException as error:  # even a CancelledError: the function may have raised it by itself
            _post(task, worker, error=error)
        else:
            _post(task, worker, value, build_s=time.perf_counter() - began_s)
            if isinstance(value, LoopRelay):
                await value.pour_async()

    async def _awaited_answer(self, value: Any) -> Any:
        return await self._function(value)


class AwaitedStep(AwaitedJob):
    """Takes one result of an async generator."""

    stage = RestStage

    async def _awaited_answer(self, value: Any) -> StartedGenerator:
        results = value.results if isinstance(value, StartedGenerator) else aiter(self._function(value))
        try:
            return StartedGenerator(results, None, await anext(results))
        except StopAsyncIteration:
            return StartedGenerator(None, is_over=True)


class AwaitedPour(AwaitedJob):
    """Pours an async generator's results into a relay."""

    stage = RelayStage

    async def _awaited_answer(self, value: Any) -> LoopRelay[Any]:
        relay: LoopRelay[Any] = LoopRelay(MAX_POURED, asyncio.get_running_loop(), **self._relay_options)
        relay.source = self._function(value)
        return relay


JOBS: dict[Kind, tuple[type[FunctionJob], type[FunctionJob]]] = {
    Kind.FUNCTION: (FunctionJob, FunctionJob),
    Kind.COROUTINE: (AwaitedJob, AwaitedJob),
    Kind.GENERATOR: (Pour, Step),
    Kind.ASYNC_GENERATOR: (AwaitedPour, AwaitedStep),
}
"""For results in order, and for those that come as they are ready."""


def _value(task: Send) -> Any:
    assert isinstance(task.work, IndexWork), "a stage hands out items"
    return task.work.indices


def _post(task: Send, worker: CrewWorker, value: Any = None, **more: Any) -> None:
    """Answer a task with a value, or with an error."""
    worker.post((Answered(task, value, **more),))
