"""Tells an exception of a signal handler from an exception of the code that the handler interrupted.

Python runs signal handlers on the main thread, between any two bytecode instructions. An exception of a handler
propagates through the code that it interrupted.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
import traceback
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised this error. Call it on the thread that caught the error.

    It looks in the traceback for the code of the installed handlers, and for what was called as one: a handler may
    uninstall itself. One written in C has neither, so its errors count as errors of the interrupted code.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code in handlers or _got_signal(frame) for frame in frames)


def _got_signal(frame: FrameType) -> bool:
    """Return whether a function was called with a number and the frame that it interrupted, which seems to call it."""
    names, rest, _, values = inspect.getargvalues(frame)
    given = [*map(values.get, names), *(values.get(rest or "") or ())]
    return any(type(one) is int and other is frame.f_back is not None for one, other in pairwise(given))


@contextmanager
def blocked(signals: Collection[int]) -> Iterator[None]:
    """Block signals on this thread meanwhile. A handler may raise as they are blocked, and as they are let through."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_finalizer(finalizer: weakref.finalize[..., Any]) -> None:
    """Run a finaliser whose function is idempotent. If an interrupt ends it, run the function again, and raise.

    A finaliser runs once only, and the interrupt may have come before its function did anything.
    """
    pending = finalizer.peek()
    try:
        finalizer()
    except BaseException:
        if pending is not None:
            _, function, arguments, keywords = pending
            function(*arguments, **(keywords or {}))
        raise


def _code_of(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    for candidate in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004 - this isn't a test for callable
        code = getattr(candidate, "__code__", None)  # a bound method has the code of its function
        if isinstance(code, CodeType):
            return code
    return None
