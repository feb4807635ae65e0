"""Notes which code asks for something that differs each time: the time, the kernel's random bytes, the process id.

Replaces functions of the standard library in this process, so it is only for a process that compares samples.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
import uuid
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from swift_loader.doctor.probes.own_code import is_users_file, shown_file

__all__ = ["EntropyWatch"]

_WATCHED: tuple[tuple[ModuleType, str, str], ...] = (
    (os, "urandom", "os.urandom"),
    (random, "_urandom", "the system's random bytes (secrets, or a generator made without a seed)"),
    (os, "getpid", "os.getpid"),
    (time, "time", "time.time"),
    (time, "time_ns", "time.time_ns"),
    (time, "perf_counter", "time.perf_counter"),
    (time, "monotonic", "time.monotonic"),
    (uuid, "uuid1", "uuid.uuid1"),
    (uuid, "uuid4", "uuid.uuid4"),
)
"""(module, name, what people call it)."""


class EntropyWatch:
    """Call `install` before the user's module is imported: it may import the functions by name."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._found: dict[str, None] | None = None

    def install(self) -> None:
        """Replace the functions."""
        for module, name, what in _WATCHED:
            setattr(module, name, self._watched(getattr(module, name), what))

    def begin(self) -> None:
        """Note calls from now on."""
        self._found = {}

    def end(self) -> tuple[str, ...]:
        """Stop, and return what was called since `begin`, with the user's line."""
        found, self._found = self._found or {}, None
        return tuple(found)

    def _watched(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._found is not None:
                line = _users_line()
                if line:
                    self._found[f"{what} at {line}"] = None
            return function(*args, **kwargs)

        return watched


def _users_line() -> str:
    """Return the innermost line of the user's code; empty if a library asked by itself."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - documented, despite its name
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
