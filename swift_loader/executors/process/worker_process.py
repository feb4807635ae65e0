"""The trainer's handle on a process that serves as a worker, whichever template it comes from."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING

from swift_loader.errors import ProtocolError
from swift_loader.executors.handle import COUNTERS
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.forks import FORKS
from swift_loader.transport.counters import read_word
from swift_loader.transport.descriptors import open_pidfd, out_of_descriptors_error
from swift_loader.transport.segments import Segment

if TYPE_CHECKING:
    from swift_loader.executors.process.template import TemplateProcess


class WorkerProcess:
    """A process that serves as a worker: a fork of a template, or one that was a template itself."""

    def __init__(self, serial: int, pid: int, pidfd: int, template: TemplateProcess, diagnostics: Diagnostics) -> None:
        self.serial = serial
        self.pid = pid
        self.pidfd = pidfd
        """Owned by this object. Readable once the process has ended."""
        self.template = template
        """The template that reports its exit code."""
        self.diagnostics = diagnostics
        self.exit_code: int | None = None
        """Known once the template has reported it, or the loader has ended it."""
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns; -1 once closed."""
        return [self.pidfd]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.pidfd < 0 or is_readable(self.pidfd)

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until the process has ended. Return False if that takes longer. Any thread."""
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            if not self.has_ended:
                pidfd = open_pidfd(self.pid)  # `self.pidfd` may be closed meanwhile
                try:
                    return is_readable(pidfd, limit_s)
                finally:
                    os.close(pidfd)
        return True

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)

    def attach(self, slot: int | None, nbytes: int, descriptors: list[int]) -> Segment:
        """Map memory that it announced; see `executors.handle.HandledProcess`."""
        what = "a page of counters" if slot is COUNTERS else "a segment"
        return Segment.attach(_only(descriptors, what), nbytes)

    def num_fetched(self, length_address: int) -> int | None:
        """Return the number of samples fetched for its batch, from its memory; None if the kernel doesn't allow."""
        return read_word(self.pid, length_address)

    def ask_for_stacks(self, *, by_force: bool = False) -> str:
        """Return the Python stacks of all its threads, or why there are none. See `Diagnostics.ask_for_stacks`."""
        return self.diagnostics.ask_for_stacks(self.pid, self.pidfd, by_force=by_force)

    def close(self) -> None:
        """Forward the rest of its stderr, then close the descriptors. Idempotent."""
        self.diagnostics.close()
        if self.pidfd >= 0:
            pidfd, self.pidfd = self.pidfd, -1  # first, see `Holder`
            os.close(pidfd)
        if self.exit_code is None:
            self.exit_code = 0


def is_readable(pidfd: int, limit_s: float | None = 0) -> bool:
    """Return whether a process has ended. Wait for that at most `limit_s`; None: without a limit."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else max(0.0, limit_s) * 1000))


def _only(descriptors: list[int], what: str) -> int:
    """Return the one descriptor that came with a message.

    Raises:
        NoDescriptorsLeft: None came, because the kernel drops descriptors if the receiver has no room for them.
        ProtocolError: More than one came.
    """
    if not descriptors:
        raise out_of_descriptors_error()
    if len(descriptors) != 1:
        raise ProtocolError(f"{what} was announced with {len(descriptors)} descriptors")
    return descriptors[0]
