"""A fork of the template from before it built the dataset, for when the dataset can't be shared.

Only building it shows whether it can: it may open files, or start threads. The spare has imported what the dataset is
made of and nothing else, so that workers can be forked from it that build a dataset each, once per process.
"""

from __future__ import annotations

import os
import warnings

from swift_loader.worker.termination import die_with_parent, flush_streams

__all__ = ["Spare"]

_GO, _END = b"1", b"0"


class Spare:
    """The template's handle on the fork, which waits to be told."""

    def __init__(self, pid: int, go: int) -> None:
        self._pid = pid
        self._go = go
        """Where it is told; owned."""

    @classmethod
    def fork(cls) -> Spare | None:
        """Return the handle; in the fork, return None once it is to take over. It ends if it isn't needed."""
        template = os.getpid()
        wait, go = os.pipe()
        flush_streams()  # else the spare would print what is in the buffers once more
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which may still be on their way out
            pid = os.fork()
        if pid:
            os.close(wait)
            return cls(pid, go)
        die_with_parent(template)
        os.close(go)
        if os.read(wait, 1) != _GO:
            os._exit(0)
        os.close(wait)
        return None

    def fileno(self) -> int:
        """Return the descriptor over which it is told, which is open in the template for as long as it waits."""
        return self._go

    def take_over(self) -> int:
        """Have it take over, and return its exit code once it has ended."""
        return self._tell(_GO)

    def release(self) -> None:
        """End it and reap it: the dataset is shared, or forks are of no use."""
        self._tell(_END)

    def _tell(self, word: bytes) -> int:
        """Say it, and return the exit code once the spare has ended."""
        os.write(self._go, word)  # closing it wouldn't do: what the dataset has started may hold it open
        os.close(self._go)
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)
