"""Collects the last lines of a process's stderr and its Python stacks, for messages.

The process writes its stderr to a pipe, which the trainer forwards to its own stderr at once. The fault handler writes
stacks to another one: a socket, over which the trainer asks for them, would hold only the first few lines, because each
stack is hundreds of tiny writes. Reading never blocks: the starter's thread calls `forward`, and any thread may ask
for stacks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from pathlib import Path

from swift_loader.executors.failures import StderrTail, readable
from swift_loader.executors.process.forks import FORKS
from swift_loader.transport.channel import new_pipe, new_socketpair
from swift_loader.worker.process import DUMP_SIGNAL, StackDumper

MAX_TRACE_BYTES = 8192

_READ_BYTES = 65536

_ANSWER_S = 0.5
"""A process that isn't blocked in the kernel begins to answer within this time."""

_QUIET_MS = 50
"""A process that writes its stacks doesn't pause this long."""

_OURS = f'File "{Path(__file__).parents[2]}/worker/'.encode()

_CODE = b'  File "<string>"'
"""What was run with `-c`."""

_DUMPER = f" in {StackDumper.write_when_asked.__name__}".encode()
"""Where the thread is that writes the stacks."""

_IDLE = b" in _run_all"
"""Where a thread is that has nothing to read; see `worker.mapped`."""

_HEADS = (b"Thread 0x", b"Current thread 0x")

_STATES = {
    "T": "the process is stopped, by SIGSTOP or a debugger",
    "t": "the process is stopped by a debugger",
    "R": "C code holds the GIL",
    "S": "C code holds the GIL",
    "D": "the process waits in the kernel for a disk or a network file system",
    "Z": "the process has ended",
}


class Diagnostics:
    """The trainer's ends of the pipes for a process's stderr and stacks, and of the socket that asks for stacks."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as unless_made:
            self._stderr, their_stderr = _pipe(unless_made)
            self._traces, their_traces = _pipe(unless_made)
            asking, their_asking = new_socketpair(socket.SOCK_STREAM)
            # The process takes its end of the pipe out of the socket.
            os.set_blocking(their_traces, False)
            socket.send_fds(asking, [b"\0"], [their_traces])
            unless_made.pop_all()
        os.close(their_traces)
        self._asking = asking.detach()
        self.their_ends = [their_stderr, their_asking.detach()]
        """The process's ends, which it inherits. Open here until `close_their_ends`."""
        for descriptor in (self._stderr, self._traces, self._asking, self.their_ends[1]):
            os.set_blocking(descriptor, False)
        self._tail = StderrTail()
        FORKS.holders.add(self)

    def close_their_ends(self) -> None:
        """Close the process's ends here, once it has its copies. Idempotent."""
        ends, self.their_ends = self.their_ends, []
        for descriptor in ends:
            os.close(descriptor)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to forward."""
        return self._stderr

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; some may be -1."""
        return [self._stderr, self._traces, self._asking, *self.their_ends]

    def forward(self) -> bool:
        """Forward what the process wrote to stderr. Return False at end of file."""
        while self._stderr >= 0:
            data = _read(self._stderr, _READ_BYTES)
            if not data:
                return data is None
            self._tail.add(data)
        return False

    def last_lines(self) -> str:
        """Return the last lines that the process wrote to stderr, as printable text."""
        self.forward()
        return self._tail.last_lines()

    def last_traces(self) -> str:
        """Return the stacks that were written since the last call. After a crash, these are the stacks of the crash."""
        data = _read(self._traces, _READ_BYTES) if self._traces >= 0 else None
        return readable(_of_the_user((data or b"")[:MAX_TRACE_BYTES].splitlines()))

    def ask_for_stacks(self, pid: int, pidfd: int, *, by_force: bool = False) -> str:
        """Return the Python stacks of all threads of the process, or the reason why there are none.

        Blocks for half a second at most, with `by_force` for a second. `by_force` sends a signal if the process doesn't
        answer. It may interrupt system calls of C code, so it is only for a process that will be killed anyway.
        """
        self.last_traces()
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._asking, b"?")
        collected = self._collect()
        if not collected and by_force:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
            collected = self._collect()
        if not collected:
            return f"(none: {_STATES.get(_state(pid), 'the process is gone')})"
        return readable(_of_the_user(collected.splitlines()))

    def _collect(self) -> bytes:
        """Return all output up to the first pause of `_QUIET_MS`."""
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
        """Forward the rest of stderr, then close the descriptors. Idempotent."""
        self.forward()
        self.close_their_ends()
        descriptors = self._stderr, self._traces, self._asking
        self._stderr = self._traces = self._asking = -1  # before it is closed, see `Holder`
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


def _pipe(unless_made: contextlib.ExitStack) -> tuple[int, int]:
    """Return a new pipe, which `unless_made` closes."""
    ours, theirs = new_pipe()
    for descriptor in (ours, theirs):
        unless_made.callback(os.close, descriptor)
    return ours, theirs


def _read(descriptor: int, at_most: int) -> bytes | None:
    """Return the available bytes; `b""` at end of file, None if there are none yet."""
    try:
        return os.read(descriptor, at_most)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # the process ended without reading our request
        return b""


def _of_the_user(lines: list[bytes]) -> list[bytes]:
    """Remove the frames below the user's code, those of the worker's loop and of the template, and our own threads."""
    threads: list[list[bytes]] = [[]]
    for line in lines:
        if line.startswith(_HEADS):
            threads.append([])
        threads[-1].append(line)
    users = [line for thread in threads if not _is_ours(thread) for line in thread]
    return [line for line in users if _OURS not in line and not line.startswith(_CODE)]


def _is_ours(thread: list[bytes]) -> bool:
    """Return whether it is the thread that writes the stacks, or one that has nothing to read."""
    top = b"".join(thread[1:2])
    return any(_OURS in line and line.endswith(_DUMPER) for line in thread) or (_OURS in top and top.endswith(_IDLE))


def _state(pid: int) -> str:
    """Return the letter for a process's state in /proc; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
