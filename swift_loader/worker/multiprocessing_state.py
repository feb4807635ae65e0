"""The state of the standard library's `multiprocessing` in a process that was forked and ends without it."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from types import ModuleType


def be_child(name: str) -> None:
    """Be no "MainProcess" for `multiprocessing`, and have a parent. Programs look there to do things only once."""
    from multiprocessing import process

    process.current_process().name = name
    threading.current_thread().name = "MainThread"  # a fork may be made by another thread
    with suppress(AttributeError, OSError):  # only Linux has pidfds
        # Private, but what multiprocessing's own children do. The descriptor stays open until the process ends.
        sentinel = os.pidfd_open(os.getppid())
        process._parent_process = process._ParentProcess("MainProcess", os.getppid(), sentinel)  # type: ignore[attr-defined] # noqa: SLF001


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
