"""Starts a template as a fork of the trainer, for datasets and functions that can't be serialised.

The thread that starts the loader forks, so the dataset finds what belongs to that thread: `threading.local`, torch's
grad mode, an SQLite connection. Locks of the user's other threads stay locked in the fork, as with any fork.

A fork is made once per loader: a second one would be a copy of a trainer that has changed meanwhile. So workers that
die are replaced by forks of the fork. If the fork itself dies, a fresh interpreter takes its place, or the run ends.
"""

from __future__ import annotations

import fcntl
import gc
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from swift_loader.executors.process.forks import FORKS
from swift_loader.runtime import SIGNALS, blocked, handled_signals
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.payload import Environment
from swift_loader.worker.loop import DatasetBuilder
from swift_loader.worker.process import (
    ALLOCATORS,
    StackDumper,
    die_with_parent,
    exit_code_of,
    flush_streams,
    fork_quietly,
    lead_group,
    reset_multiprocessing,
    reset_signals,
    run_and_exit,
)
from swift_loader.worker.spec import WorkerSpec, definitions_of
from swift_loader.worker.template import be_template


class ForkedChild:
    """A fork of the trainer. See `server.Launcher`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        """Reap it, and return its exit code. It must have ended."""
        if self.returncode is None:
            try:
                status = os.waitpid(self.pid, 0)[1]
            except ChildProcessError:  # reaped at once, as the trainer ignores SIGCHLD, or by the user's code
                status = 0
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def end(self) -> None:
        """Kill and reap it, if it wasn't reaped. Needs no descriptor."""
        with suppress(ProcessLookupError, ChildProcessError):
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.returncode = -signal.SIGKILL


# A template that is a fork of the trainer: it has the dataset already, whatever that holds.
#
# It differs from a fresh interpreter in what it inherits. It keeps the user's descriptors, because the dataset may read
# from them. It gives up everything that would act on the trainer: the trainer's own pipes, its signal handlers, its
# standard input, and whatever Python does when a process ends.


def be_forked_template(pidfd: int, pipes: tuple[int, int, int], builder: DatasetBuilder) -> NoReturn:
    """Be a template from now on. Runs in the fork, on its only thread, with all signals blocked.

    `pidfd`: readable once the trainer has ended; -1: the kernel kills this process then. `pipes`: the descriptors of
    the channel, for traces, and for stderr. `builder` has the trainer's own dataset and functions.
    """
    gc.freeze()  # no object of the trainer is ever finalised here: that might act on what it shares with the trainer
    lead_group()
    channel, traces, stderr = (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3) for descriptor in pipes)
    _replace_descriptors(stderr, {*_descriptors(), *pipes})
    # What the trainer has set for itself in this interpreter. Its own stdout stays, as in torch's workers.
    sys.excepthook = sys.__excepthook__
    reset_multiprocessing()
    signal.set_wakeup_fd(-1)  # else each signal here would wake the trainer's asyncio loop
    reset_signals(handled_signals())  # unblocks them
    run_and_exit(partial(be_template, Channel.from_descriptor(channel), StackDumper(traces), builder, pidfd))


def _replace_descriptors(stderr: int, foreign: set[int]) -> None:
    """Put /dev/null in place of standard input and of the trainer's own descriptors, and set stderr.

    They aren't closed: an object of the trainer may still close its number, which must not be a new file by then.
    """
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), fcntl.F_DUPFD_CLOEXEC, 3)
    for descriptor in foreign:
        os.dup2(null, descriptor, inheritable=False)
    if sys.__stdin__ is not None:  # else the trainer has no standard input, and 0 may be a file of the user's
        os.dup2(null, 0)
    if sys.__stderr__ is not None:
        os.dup2(stderr, 2)
    os.close(stderr)
    os.close(null)


class TrainerFork:
    """What a fork of this process needs to be a template."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Fork nothing yet. The fork will have the same objects as `spec`."""
        self._spec = spec
        self.definitions = Definitions(definitions_of(spec.options))
        """Classes and functions that can't be imported. The fork has the same ones, under the same numbers."""
        self._child: ForkedChild | None = None

    def end(self) -> None:
        """End the fork, if there is one: the start was interrupted, so nobody else may know of it."""
        if self._child is not None:
            self._child.end()

    def start(self, channel: int, traces: int, stderr: int) -> ForkedChild:
        """Fork this process. The fork gets copies of the descriptors. Runs on the thread that starts the loader."""
        # The kernel kills a process when the thread that forked it ends, so another thread's fork watches the process.
        trainer, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
        pidfd = -1 if is_main else os.pidfd_open(trainer)
        # One thread: torch's pool of threads isn't in the fork, and waiting for it would never end.
        environment = replace(Environment.of_this_process(self._spec.modules), torch_threads=1)
        builder = DatasetBuilder((self._spec, self.definitions), environment)
        flush_streams()  # else the fork would print the buffers' content once more
        try:
            with blocked(SIGNALS):
                self._child = ForkedChild(fork_quietly())
                if self._child.pid == 0:
                    exit_code = 1
                    try:
                        if is_main:
                            die_with_parent(trainer)
                        be_forked_template(pidfd, (channel, traces, stderr), builder)
                    except OSError as error:
                        exit_code = exit_code_of(error)
                    finally:
                        os._exit(exit_code)  # whatever happens, the trainer's code isn't run twice
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        return self._child


def _descriptors() -> Iterator[int]:
    """Yield the descriptors of all loaders of the trainer. Runs in the fork."""
    for holder in FORKS.holders:
        yield from (number for number in holder.descriptors() if number >= 0)


# Finds forks that hang ------------------------------------------------------------------------------------------------

_FUTEX, _POLLS = {"x86_64": (202, (7, 271)), "aarch64": (98, (73,))}.get(platform.machine(), (-1, ()))
"""The numbers of the system calls that wait for a lock, and for descriptors."""

_WAITS = (0, 9)
"""FUTEX_WAIT and FUTEX_WAIT_BITSET, from <linux/futex.h>."""

_PRIVATE = 128
"""FUTEX_PRIVATE_FLAG: no other process can free the lock."""


class ForkWatch:
    """Finds forks of the trainer that wait for ever: a lock of a thread that wasn't forked stays locked in them."""

    new_s, look_s = 0.25, 2.0
    """How often those are looked at that owe their first answer, and the others."""
    proof_s = 1.0
    """For how long none of a fork's threads may have run."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, str]] = {}
        """By process: since when all of its threads have waited, and what shows that they have."""

    def finds(self, pid: int) -> bool:
        """Return whether a process hangs. To be called again and again, as the first look never finds it."""
        now_s, waits = time.monotonic(), _waits(pid)
        if not waits or self._seen.get(pid, (0.0, ""))[1] != waits:
            self._seen[pid] = now_s, waits
        return bool(waits) and now_s - self._seen[pid][0] >= self.proof_s


def _waits(pid: int) -> str:
    """Return the threads of a process, how often each has run, and the lock that it waits for without a limit.

    Only the process itself can free those locks. So if it returns the same later, none of the threads has run, and none
    ever will. The thread that writes the stacks is one of them, and waits for the trainer. Empty if another thread
    doesn't wait so, or the kernel doesn't tell.
    """
    threads, num_polling = "", 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if (thread / "comm").read_text().strip() in ALLOCATORS:  # it frees nobody's lock
                continue
            call = (thread / "syscall").read_text()
            number, _, operation, _, limit = (int(word, 0) for word in call.split()[:5])
            if number in _POLLS:
                num_polling += 1
            elif number != _FUTEX or not operation & _PRIVATE or operation & 15 not in _WAITS or limit:
                return ""
            num_runs = [line for line in (thread / "status").read_text().splitlines() if "ctxt_switches" in line]
            threads += f"{thread.name} {call} {num_runs}"
    except (OSError, ValueError):  # it runs, or has ended
        return ""
    return threads if num_polling <= 1 else ""
