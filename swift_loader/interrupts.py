"""Tells an exception of a signal handler from an exception of the code that the handler interrupted.

Python runs signal handlers on the main thread, between any two bytecode instructions. An exception of a handler
propagates through the code that it interrupted.
"""

from __future__ import annotations

import functools
import signal
import threading
import weakref
from types import CodeType
from typing import Any


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised this error. Call it on the thread that caught the error.

    It looks for the code of the installed handlers in the traceback. A handler written in C has no code object, and a
    handler that was uninstalled meanwhile isn't found. Their errors count as errors of the interrupted code.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    entry = error.__traceback__
    while entry is not None and handlers:
        if entry.tb_frame.f_code in handlers:
            return True
        entry = entry.tb_next
    return False


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
