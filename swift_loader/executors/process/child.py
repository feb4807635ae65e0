"""A child process of the trainer: what `subprocess.Popen` offers, and the same for a fork of the trainer."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class ChildProcess(Protocol):
    """A process that serves as a template."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def returncode(self) -> int | None:
        """The exit code, as from `os.waitstatus_to_exitcode`. None until `wait` has returned it."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended, and reap it.

        Raises `subprocess.TimeoutExpired` if that takes longer than `timeout` seconds.
        """


Start = Callable[[int, int, int], ChildProcess]
"""Starts a template, which gets copies of three descriptors: of the channel, for traces, and for stderr."""


class ForkedChild:
    """A fork of the trainer. See `ChildProcess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """See `ChildProcess`."""
        if self.returncode is None:
            self.returncode = self._reap(timeout)
        return self.returncode

    def end(self) -> None:
        """Kill and reap it. Needs no descriptor."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _reap(self, timeout: float | None) -> int:
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it was reaped at once, because the trainer ignores SIGCHLD
            return 0
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("the fork", timeout or 0.0)
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # as above, or the user's code has reaped it
            return 0
        finally:
            os.close(pidfd)
        return os.waitstatus_to_exitcode(status)

    def __repr__(self) -> str:
        return f"<ForkedChild pid {self.pid}, exit code {self.returncode}>"
