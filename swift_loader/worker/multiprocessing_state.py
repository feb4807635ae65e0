"""The state of the standard library's `multiprocessing` in a process that was forked without it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["reset_multiprocessing"]


def reset_multiprocessing() -> None:
    """Tell `multiprocessing` that this is a new process: its queues and locks must not act for the parent."""
    util: Any = sys.modules.get("multiprocessing.util")
    if isinstance(util, ModuleType):
        # Private, but the only way: multiprocessing's own forks call these, and torch registers a function there.
        util._finalizer_registry.clear()  # noqa: SLF001
        util._run_after_forkers()  # noqa: SLF001
