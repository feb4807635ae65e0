"""Ends the loader's processes: when their parents end, without Python's tear-down, and with all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

from swift_loader.errors import NoProcessesLeft

NO_PROCESSES_LEFT = 71
"""The exit code of a process that could start no thread or process: EX_OSERR, which Windows doesn't name."""

NO_DESCRIPTORS_LEFT = 72
"""The exit code of a process that ran out of file descriptors: EX_OSFILE."""

# The state of the standard library's `multiprocessing` in a process that was forked and ends without it.


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


_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, also if this process is busy or stopped.

    The kernel sends the signal when the parent's *thread* ends. A template forks on its main thread. The trainer starts
    templates on the supervisor's thread, which lives as long as the processes do, or is forked by its own main thread.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def lead_group() -> None:
    """Put this process into its own process group. Processes that the dataset starts will be in it, too."""
    with contextlib.suppress(PermissionError):  # it already leads a session, and so a group
        os.setpgid(0, 0)


def end_group(leader: int) -> None:
    """Send SIGTERM to the rest of an ended process's group. Call it before reaping, while the pid is still valid.

    SIGTERM instead of SIGKILL, because multiprocessing's resource tracker ignores SIGTERM: it must still remove names
    of shared memory.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGTERM)
        os.killpg(leader, signal.SIGCONT)


def flush_streams() -> None:
    """Flush the output buffers of Python and C. Else a fork would print its copy of them once more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, broken or None
            stream.flush()
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)


def end_process(exit_code: int) -> NoReturn:
    """End the process without Python's tear-down: a fork must not finalise its copies of the template's objects."""
    flush_streams()
    os._exit(exit_code & 0xFF)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that this error ends."""
    if isinstance(error, NoProcessesLeft):
        return NO_PROCESSES_LEFT
    is_out_of_descriptors = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return NO_DESCRIPTORS_LEFT if is_out_of_descriptors else 1


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Run, and end this process with the exit code that is returned, or that Python gives for what is raised."""
    exit_code = 1
    try:
        exit_code = run()
    except SystemExit as request:
        exit_code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException as error:
        exit_code = exit_code_of(error)
        sys.excepthook(*sys.exc_info())
    finally:
        end_process(exit_code)
