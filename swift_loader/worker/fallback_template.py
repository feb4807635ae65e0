"""A fork of the template, made before it builds the dataset. It is used if the dataset can't be shared.

Only building the dataset shows whether it can be shared: the constructor may open files or start threads. The fallback
has imported the dataset's modules and done nothing else. So workers forked from it can each build their own dataset,
and the constructor runs once per process.
"""

from __future__ import annotations

import os
import warnings

from swift_loader.worker.process_exit import die_with_parent, flush_streams

_GO, _END = b"1", b"0"


class FallbackTemplate:
    """The template's handle of the fork, which waits for an instruction."""

    def __init__(self, pid: int, go: int) -> None:
        self._pid = pid
        self._go = go
        """The pipe's end to write the instruction to; owned."""

    @classmethod
    def fork(cls) -> FallbackTemplate | None:
        """Fork this process, the template. Return the handle.

        In the fork, block; return None if it must take over. If it isn't needed, the fork exits.
        """
        template = os.getpid()
        wait, go = os.pipe()
        flush_streams()  # else the fallback would print the buffers' content once more
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which may be about to end
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
        """Return the descriptor of the pipe. It is open in the template as long as the fallback waits."""
        return self._go

    def take_over(self) -> int:
        """Let the fallback take over. Block until it has ended, and return its exit code."""
        return self._tell(_GO)

    def release(self) -> None:
        """End the fallback and reap it: the dataset is shared, or the template can't be forked."""
        self._tell(_END)

    def _tell(self, word: bytes) -> int:
        """Send the instruction. Block until the fallback has ended, and return its exit code."""
        os.write(self._go, word)  # closing isn't enough: a process started by the dataset may hold the pipe open
        os.close(self._go)
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)
