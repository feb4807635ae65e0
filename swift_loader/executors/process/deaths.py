"""Puts into words how a process ended, passes on what it wrote to stderr, and finds forks that hang."""

from __future__ import annotations

import os
import platform
import select
import signal
import sys
import textwrap
import time
from collections.abc import Iterable
from contextlib import suppress

from swift_loader.errors import NoProcessesLeft, WorkerDied
from swift_loader.executors.wording import LOADER_TERMS, Terms
from swift_loader.threads import limits_of_processes
from swift_loader.transport.channel import out_of_descriptors_error
from swift_loader.worker.process import NO_DESCRIPTORS_LEFT, NO_PROCESSES_LEFT

_SIGKILL = 9
"""Windows has no `signal.SIGKILL`."""

_UNREAD_S = 0.2
"""How long to wait for a trainer's stderr that is full."""
_PIPE_BUF = getattr(select, "PIPE_BUF", 512)
"""A pipe that can be written takes so many bytes at once; Windows doesn't say."""


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a process ended."""
    if exit_code is None:
        return "ended with an unknown exit status"
    return f"was ended by {_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"


def died(
    who: str,
    exit_code: int | None,
    consequence: str,
    *,
    traces: str = "",
    stderr: str = "",
    terms: Terms = LOADER_TERMS,
) -> WorkerDied:
    """Return the error for a process that died.

    `exit_code`: as from `os.waitstatus_to_exitcode`; None: unknown. `consequence`: what it means for the loop.
    `traces`: output of the fault handler, if it crashed. `stderr`: its last lines. `terms`: the words for the hint.
    """
    hint = ""
    if exit_code == NO_PROCESSES_LEFT:
        return NoProcessesLeft(f"{who} could start no thread or process; {consequence}. {limits_of_processes()}")
    if exit_code == NO_DESCRIPTORS_LEFT:
        hint = f". It ran out of file descriptors: {str(out_of_descriptors_error()).partition('file descriptors: ')[2]}"
    elif exit_code == -_SIGKILL:
        hint = f". The kernel sends SIGKILL when memory runs out: see dmesg, and use {terms.saving}"
    elif exit_code is not None and exit_code < 0:
        hint = f". The {terms.code}, or a library that it uses, crashed"
    elif exit_code is not None:
        hint = f". If its stderr has no reason, the {terms.code} ended it: look for sys.exit and os._exit"
    return WorkerDied(f"{who} {how_it_ended(exit_code)}; {consequence}{hint}{attached(traces=traces, stderr=stderr)}")


def attached(*, traces: str = "", stderr: str = "") -> str:
    """Return a process's stack and stderr as the end of a message; empty if there are none."""
    parts = [("Its Python stack", traces), ("The last lines of its stderr", stderr)]
    return "".join(f"\n{title}:\n{textwrap.indent(text, '    ')}" for title, text in parts if text)


def readable(lines: Iterable[bytes]) -> str:
    """Return lines of a process's output as printable text."""
    texts = (line.decode("utf-8", "backslashreplace") for line in lines)
    return "\n".join("".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text) for text in texts)


def write_stderr(data: bytes) -> None:
    """Write to this process's inherited stderr, as its workers would, even if `sys.stderr` is something else.

    If nobody reads it for `_UNREAD_S`, the rest is dropped, so that the thread can continue. If this process started
    without a stderr, all of it is dropped: descriptor 2 may be closed, or be something else.
    """
    if sys.__stderr__ is None:
        return
    view = memoryview(data)
    with suppress(OSError):  # closed, or nobody reads it
        while view and (sys.platform == "win32" or select.select([], [2], [], _UNREAD_S)[1]):
            view = view[os.write(2, view[:_PIPE_BUF]) :]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


_FUTEX, _POLLS = {"x86_64": (202, (7, 271)), "aarch64": (98, (73,))}.get(platform.machine(), (-1, ()))
"""The numbers of the system calls that wait for a lock, and for descriptors."""

_WAITS = (0, 9)
"""FUTEX_WAIT and FUTEX_WAIT_BITSET, from <linux/futex.h>."""

_PRIVATE = 128
"""FUTEX_PRIVATE_FLAG: no other process can free the lock."""


class ForkWatch:
    """Finds forks of the trainer that wait for ever: a lock of a thread that wasn't forked stays locked in them."""

    look_s = 2.0
    """How often they are looked at. Two looks show that one hangs."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        """Since when each process has waited."""

    def finds(self, pid: int) -> bool:
        """Return whether a process hangs. To be called again and again, as the first look never finds it."""
        if not _waits_for_ever(pid):
            self._since_s.pop(pid, None)
            return False
        now_s = time.monotonic()
        return now_s - self._since_s.setdefault(pid, now_s) >= 0.9 * self.look_s


def _waits_for_ever(pid: int) -> bool:
    """Return whether a process waits, without a limit, for a lock that only its own threads can free, and has none.

    It may have the thread that writes its stacks, which waits for the trainer. False if the kernel doesn't tell.
    """
    try:
        calls = [_system_call(pid, int(thread)) for thread in os.listdir(f"/proc/{pid}/task") if int(thread) != pid]
        number, _, operation, _, limit = _system_call(pid, pid)
    except (OSError, ValueError):
        return False
    is_alone = len(calls) <= 1 and all(call and call[0] in _POLLS for call in calls)
    is_private = operation & _PRIVATE != 0 and operation & 15 in _WAITS
    return is_alone and number == _FUTEX and is_private and not limit


def _system_call(pid: int, thread: int) -> list[int]:
    """Return the number and the first arguments of the system call that a thread is in. Empty if it runs."""
    with open(f"/proc/{pid}/task/{thread}/syscall", encoding="ascii") as line:
        return [int(word, 0) for word in line.read().split()[:5] if word != "running"]
