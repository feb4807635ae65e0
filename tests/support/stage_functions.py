"""Functions for the stages of pipelines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np

from swift_loader import sample_rng


def plus_one(number: int) -> int:
    return number + 1


def some(number: int) -> Iterator[tuple[int, int]]:
    """Yield none, one or two results."""
    for part in range(number % 3):
        yield number, part


async def async_plus_one(number: int) -> int:
    await asyncio.sleep(0)
    return number + 1


async def async_some(number: int) -> AsyncIterator[tuple[int, int]]:
    for part in range(number % 3):
        await asyncio.sleep(0)
        yield number, part


FUNCTIONS: dict[str, tuple[Callable[[int], Any], Any, Callable[[int], list[Any]]]] = {
    "function in threads": (plus_one, "thread", lambda number: [number + 1]),
    "generator in threads": (some, "thread", lambda number: list(some(number))),
    "coroutine": (async_plus_one, None, lambda number: [number + 1]),
    "async generator": (async_some, None, lambda number: list(some(number))),
    "function in processes": (plus_one, "process", lambda number: [number + 1]),
    "generator in processes": (some, "process", lambda number: list(some(number))),
}
"""By name: a function, where it runs, and what it gives for an item."""


def uneven(number: int) -> int:
    """Take longer for some items than for others."""
    time.sleep(0.002 * (number % 7 == 0))
    return number


def hanging_at(position: int, released: threading.Event, begun: list[int] | None = None) -> Callable[[int], int]:
    """Return a function that hangs at an item."""

    def hang(number: int) -> int:
        if number == position:
            if begun is not None:
                begun.append(position)
            released.wait(60)
        return number

    return hang


async def async_hangs_at_three(number: int) -> int:
    await asyncio.sleep(60 if number == 3 else 0)
    return number


def fails_at_five(number: int) -> int:
    if number == 5:
        raise LookupError("number five")
    return number


async def async_fails_at_five(number: int) -> int:
    return fails_at_five(number)


def yields_then_fails(number: int) -> Iterator[int]:
    yield number
    if number == 5:
        raise LookupError("number five")


def draw(number: int) -> tuple[int, float]:
    return number, float(sample_rng().random())


def array_of(number: int) -> dict[str, Any]:
    return {"id": number, "pixels": np.full((50, 40), number % 256, np.uint8)}


class Counted:
    """A source that says where it is."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.position = 0
        self.num_pulled = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.num:
            self.position += 1
            self.num_pulled += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class OwnEpochs:
    """A source that counts its epochs itself: another order in each. At the end of one, nothing is left."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.epoch, self.position = -1, 0
        self._loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[int]:
        if self._loaded is None:
            self.epoch, self.position = self.epoch + 1, 0
        else:
            self.epoch, self.position, self._loaded = self._loaded["epoch"], self._loaded["position"], None
        while self.position < self.num:
            self.position += 1
            yield (self.position * (2 * self.epoch + 1)) % self.num

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loaded = state


class AsyncCounted(Counted):
    """An async source that says where it is, after the item that it gave last."""

    __iter__ = None  # type: ignore[assignment] # it has no other iterator

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in Counted.__iter__(self):
            await asyncio.sleep(0)
            yield number


class AsyncNumbers:
    def __init__(self, num: int) -> None:
        self.num = num

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(self.num):
            await asyncio.sleep(0)
            yield number


class Numbers:
    """An iterable that is neither a sequence nor has a state or a length."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))
