"""What kind of function the user gave to a stage."""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from types import CoroutineType, GeneratorType
from typing import Any

from swift_loader.executors.calls import call_soon


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


def as_function(given: Any) -> Callable[[Any], Any]:
    """Return a function for what the user gave to a stage: a callable, or a dict or list to look items up in.

    Raises `TypeError` if it is neither.
    """
    if (
        inspect.isfunction(given)
        and kind_of(given) is Kind.FUNCTION
        and kind_of(inspect.unwrap(given)) is Kind.GENERATOR
    ):
        return functools.partial(_results_of, given)
    if callable(given):
        return given  # type: ignore[no-any-return]
    if hasattr(given, "__getitem__"):
        return functools.partial(operator.getitem, given)
    raise TypeError(f"a stage needs a function, but {given!r} can't be called")


def _results_of(function: Callable[[Any], Any], item: Any) -> Iterator[Any]:
    """Yield what a decorated generator gives: its results, or the one that the decorator has made of them."""
    result = function(item)
    yield from result if isinstance(result, GeneratorType) else (result,)


@dataclass(frozen=True)
class Submitted:
    """A coroutine function that has an executor of `concurrent.futures` call a plain one."""

    function: Callable[[Any], Any]
    executor: Executor
    stage: str

    async def __call__(self, item: Any) -> Any:
        """Return the result. If this is cancelled, a call that waits in the executor's queue is, too."""
        call, loop, done = self.executor.submit(self.function, item), asyncio.get_running_loop(), asyncio.Event()
        call.add_done_callback(lambda _: call_soon(loop, done.set))
        try:
            await done.wait()  # `wrap_future` never returns after a StopIteration
        finally:
            call.cancel()
        return awaited(call.result())

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"stage {self.stage!r} has executor={self.executor!r}, which can't be pickled or copied; make the "
            f"pipeline where it runs, or give on='thread' or 'process'"
        )


def awaited(result: Any) -> Any:
    """Return what a plain function gave. Raises `TypeError` if it is a coroutine."""
    if not isinstance(result, CoroutineType):
        return result
    result.close()
    raise TypeError(
        f"the function returned a coroutine, {result.__qualname__}, but isn't a coroutine function itself; give that "
        f"function, with functools.partial for its other arguments"
    )


def kind_of(function: Callable[..., Any]) -> Kind:
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


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for errors and pictures."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__
