"""What is known of a process besides its messages: the last lines of its stderr, and its Python stacks.

Its stderr is a pipe that the trainer passes on, as it comes, to its own; the fault handler has another one. Both are
read without waiting: `forward` by the pool's thread, the stacks by whoever asks for them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections import deque
from pathlib import Path

import swift_loader
from swift_loader.transport.descriptors import new_pipe, new_socketpair
from swift_loader.worker.traces import DUMP_SIGNAL

__all__ = ["Witness"]

MAX_LINES = 20
MAX_KEPT_BYTES = 4096
"""Of stderr, for an error."""

MAX_TRACE_BYTES = 8192

_READ_BYTES = 65536

_ANSWER_S = 0.5
"""How long a process that isn't blocked in the kernel needs at most to begin to answer the signal."""

_UNREAD_MS = 200
"""How long the trainer's stderr may be full."""

_QUIET_MS = 50
"""A process that writes its stacks doesn't pause so long."""

_OURS = f'File "{Path(swift_loader.__file__).parent}/worker/'.encode()

_STATES = {
    "T": "it is stopped, by SIGSTOP or a debugger",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel, for a disk or a network file system",
    "Z": "it has ended",
}


class Witness:
    """The trainer's ends of a process's stderr and traces."""

    def __init__(self) -> None:
        self._stderr, their_stderr = new_pipe()
        try:
            traces, their_traces = new_socketpair(socket.SOCK_STREAM)
        except BaseException:
            os.close(self._stderr)
            os.close(their_stderr)
            raise
        self._traces, self._their_traces = traces.detach(), their_traces.detach()
        self.their_ends = [their_stderr, self._their_traces]
        """To be passed on; ours to close."""
        for descriptor in (self._stderr, self._traces, self._their_traces):
            os.set_blocking(descriptor, False)
        self._tail: deque[bytes] = deque()
        self._num_kept = 0

    def close_their_ends(self) -> None:
        """Keep only what is ours, once the process has its copies. Idempotent."""
        ends, self.their_ends = self.their_ends, []
        for descriptor in ends:
            os.close(descriptor)

    def fileno(self) -> int:
        """Return what is readable when there is something to forward."""
        return self._stderr

    def forward(self) -> bool:
        """Pass on what the process wrote to stderr; return False at the end of it."""
        while self._stderr >= 0:
            data = _read(self._stderr, _READ_BYTES)
            if not data:
                return data is None
            _write_all(data)
            self._tail.append(data[-MAX_KEPT_BYTES:])
            self._num_kept += len(self._tail[-1])
            while self._num_kept - len(self._tail[0]) >= MAX_KEPT_BYTES:
                self._num_kept -= len(self._tail.popleft())
        return False

    def last_lines(self) -> str:
        """Return the end of what the process wrote to stderr, fit for a message."""
        self.forward()
        return _readable(b"".join(self._tail)[-MAX_KEPT_BYTES:].splitlines()[-MAX_LINES:])

    def last_traces(self) -> str:
        """Return the stacks that were written since the last call: those of a crash, if the process crashed."""
        data = _read(self._traces, _READ_BYTES) if self._traces >= 0 else None
        return _readable(_of_the_user((data or b"")[:MAX_TRACE_BYTES].splitlines()))

    def ask_for_stacks(self, pid: int, pidfd: int, *, by_force: bool = False) -> str:
        """Return the Python stacks of all its threads, or why there are none; blocks for half a second at most, or one.

        Args:
            pid: Of the process.
            pidfd: Of the process.
            by_force: Whether system calls of C code may be interrupted, because it is to be killed anyway.
        """
        self.last_traces()
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._traces, b"?")
        collected = self._collect()
        if not collected and by_force:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
            collected = self._collect()
        if not collected:
            silent = "it runs C code that keeps the interpreter's lock" if _state(pid) in ("R", "S") else "it is gone"
            return f"(none: {_STATES.get(_state(pid), silent)})"
        return _readable(_of_the_user(collected.splitlines()))

    def _collect(self) -> bytes:
        """Return what arrives until there is a pause."""
        poll = select.poll()
        poll.register(self._traces, select.POLLIN)
        wait_ms, collected = _ANSWER_S * 1000, b""
        while len(collected) < MAX_TRACE_BYTES and poll.poll(wait_ms):
            data = _read(self._traces, _READ_BYTES)
            if not data:
                break
            collected, wait_ms = collected + data, _QUIET_MS
        return collected[:MAX_TRACE_BYTES]

    def close(self) -> None:
        """Pass on the rest, and give up the descriptors. Idempotent."""
        self.forward()
        self.close_their_ends()
        for descriptor in (self._stderr, self._traces):
            if descriptor >= 0:
                os.close(descriptor)
        self._stderr = self._traces = -1

    def __repr__(self) -> str:
        return f"<Witness of {self._num_kept} bytes of stderr>"


def _read(descriptor: int, at_most: int) -> bytes | None:
    """Return what is there, nothing at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, at_most)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # it has ended without reading what it was asked
        return b""


def _write_all(data: bytes) -> None:
    """Write to the stderr that this process inherited, as its workers would; also if `sys.stderr` is something else.

    What nobody reads is dropped: the thread has other things to do. So is all of it if this process began without a
    stderr: the descriptor is somebody else's then, if it is open at all.
    """
    if sys.__stderr__ is None:
        return
    view, poll = memoryview(data), select.poll()
    poll.register(2, select.POLLOUT)
    while view and poll.poll(_UNREAD_MS):
        try:
            view = view[os.write(2, view[: select.PIPE_BUF]) :]
        except OSError:  # closed, or nobody reads it
            return


def _readable(lines: list[bytes]) -> str:
    texts = (line.decode("utf-8", "backslashreplace") for line in lines)
    return "\n".join("".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text) for text in texts)


def _of_the_user(lines: list[bytes]) -> list[bytes]:
    """Leave out the frames below the user's code: those of a worker's loop, and of the template that it was."""
    return [line for line in lines if _OURS not in line and not line.startswith(b'  File "<string>"')]


def _state(pid: int) -> str:
    """Return the letter that /proc has for the state of a process; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
