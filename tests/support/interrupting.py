"""Interrupts a call where Python may run the handler of a signal, at one point after the other.

Python looks for signals after calls. The profiler sees each return, counts it as a point, and has the handler run at
one of them. A tracer would see loops, too, but Python 3.11 can't stand one that raises in the midst of a line.
"""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

NEVER = -1


class Interrupt(BaseException):
    """What the handler raises."""


class Points:
    """Counts the points of one call, and has the handler run at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    @property
    def has_raised(self) -> bool:
        return 0 <= self.at < self.count

    def meet(self) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            signal.raise_signal(signal.SIGUSR1)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Meet a point when a function has returned: one written in C, or one in Python that raises nothing.

        What the whole call returns is the caller's.
        """
        is_return = event == "return" and frame.f_code.co_code[frame.f_lasti] in _RETURNS
        if event == "c_return" or (is_return and frame.f_back is not None and frame.f_back.f_code is not call.__code__):
            self.meet()


_RETURNS = {number for name, number in dis.opmap.items() if name.startswith(("RETURN", "YIELD"))}


def call(step: Callable[[], Any], points: Points, kind: type[BaseException], first: Callable[[], Any] = int) -> Any:
    """Call a function, and have a handler raise this at the point, after it has called another function `first`."""

    def handle(number: int, frame: FrameType | None) -> None:
        sys.setprofile(None)
        first()
        raise kind(f"at point {points.at}")

    # Python keeps no reference while it calls a profiler. If that raises in a finaliser, it is let go: it must stay.
    profile = points.profile
    profiler, handler = sys.getprofile(), signal.signal(signal.SIGUSR1, handle)
    try:
        sys.setprofile(profile)
        return step()
    finally:
        sys.setprofile(profiler)
        signal.signal(signal.SIGUSR1, handler)
