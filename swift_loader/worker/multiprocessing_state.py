"""The state of the standard library's `multiprocessing` in a process that was forked and ends without it."""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["finish_multiprocessing", "reset_multiprocessing"]


def reset_multiprocessing() -> None:
    """Tell `multiprocessing` that this is a new process: its queues and locks must not act for the parent."""
    util = _util()
    if util is not None:
        # Private, but the only way: multiprocessing's own forks call these, and torch registers a function there.
        util._finalizer_registry.clear()  # noqa: SLF001
        util._run_after_forkers()  # noqa: SLF001


def finish_multiprocessing() -> None:
    """Wait until queues have sent what was put into them here. The trainer limits how long that may take."""
    util = _util()
    if util is not None:
        util._run_finalizers()  # noqa: SLF001


def _util() -> ModuleType | None:
    return sys.modules.get("multiprocessing.util")
