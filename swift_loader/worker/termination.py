"""How the loader's processes end: with their parents, without a tear-down, and with all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

__all__ = ["die_with_parent", "end_group", "end_process", "flush_streams", "lead_group"]

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whatever it is doing then; also if it is stopped.

    The signal is sent when the parent's *thread* ends: a template forks on its main thread, and in the trainer it is
    the pool's, which lives as long as the pool.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def lead_group() -> None:
    """Put this process into a group of its own: what the dataset starts will be in it, too."""
    with contextlib.suppress(PermissionError):  # it leads a session, and so a group, already
        os.setpgid(0, 0)


def end_group(leader: int) -> None:
    """End what is left of the group of a process that has ended and isn't reaped yet, so that the number is still its.

    SIGTERM, because multiprocessing's resource tracker ignores that: it has names of shared memory to remove.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGTERM)
        os.killpg(leader, signal.SIGCONT)


def flush_streams() -> None:
    """Write what the process has printed, Python's and C's: a fork would print its copy once more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, broken or None
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def end_process(exit_code: int) -> NoReturn:
    """End without the interpreter's tear-down: a fork's copies of the template's objects must not be finalised."""
    flush_streams()
    os._exit(exit_code & 0xFF)
