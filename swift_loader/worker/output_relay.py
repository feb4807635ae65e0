"""Passes on what a shared template prints to the first rank that takes it.

The template can't have a rank's own stream: the rank may end first, and who reads that stream must then see its end.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from swift_loader.transport.descriptors import new_pipe

__all__ = ["OutputRelay"]

_READ_BYTES = 65536

_UNREAD_MS = 200
"""How long to wait for a rank's stream that is full."""


class OutputRelay:
    """A pipe in place of a standard stream."""

    def __init__(self, stream: int) -> None:
        """Make the pipe. `stream` is 1 for stdout, or 2 for stderr."""
        self.stream = stream
        self._read, self._write = new_pipe()
        os.set_blocking(self._read, False)

    def be_written_to(self) -> None:
        """Put the pipe in place of the stream. Runs in the fork that prints."""
        os.dup2(self._write, self.stream)
        os.close(self._write)
        os.close(self._read)

    def fileno(self) -> int:
        """Return the descriptor that is readable when something was printed."""
        return self._read

    def forward(self, targets: Iterable[int]) -> bool:
        """Write some of what was printed to the first target that takes it, else drop it. Return False at its end.

        It has an end after `close_writing`, when the other process has ended.
        """
        try:
            rest = memoryview(os.read(self._read, _READ_BYTES))
        except BlockingIOError:
            return True
        if not rest:
            return False
        for target in targets:
            rest = _written(target, rest)
        return True

    def close_writing(self) -> None:
        """Close this process's copy of the end that the other one writes to."""
        os.close(self._write)


def _written(target: int, rest: memoryview) -> memoryview:
    """Write to a target. Return what it didn't take."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    try:
        while rest and poll.poll(_UNREAD_MS):
            rest = rest[os.write(target, rest[: select.PIPE_BUF]) :]
    except OSError:  # nobody reads it any more
        pass
    return rest
