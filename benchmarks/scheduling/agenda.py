"""A clock of virtual time, and what happens when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["Agenda"]


class Agenda:
    """Calls functions, one after the other, at the virtual times that were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._num_planned = 0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """A heap. The number keeps the order of what happens at the same time."""

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have a function called so much later."""
        self._num_planned += 1
        heappush(self._calls, (self.now_s + seconds, self._num_planned, call, arguments))

    def step(self) -> None:
        """Call the next function. The clock jumps to its time."""
        self.now_s, _, call, arguments = heappop(self._calls)
        call(*arguments)
