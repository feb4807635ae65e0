"""Tells what the handler of a signal raised from what the code raised that it interrupted.

Python runs handlers on the main thread, between any two instructions; what one raises comes out of whatever ran there.
"""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType

__all__ = ["is_interrupt"]


def is_interrupt(error: BaseException) -> bool:
    """Return whether a handler of a signal raised this error, as far as that can be told; call it on the same thread.

    A handler is known by its code. One that is written in C has none, and one that has been taken back by now isn't
    looked for: what these raise counts as an error of the code that was interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    step = error.__traceback__
    while step is not None and handlers:
        if step.tb_frame.f_code in handlers:
            return True
        step = step.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    for candidate in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004 - not to know whether it can be
        code = getattr(candidate, "__code__", None)  # called: a bound method has the code of its function
        if isinstance(code, CodeType):
            return code
    return None
