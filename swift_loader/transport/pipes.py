"""Pipes that every system has: connections of `multiprocessing`, of which a new process inherits an end.

A message arrives complete or not at all. If the peer dies, the receiver gets everything that the peer sent, then the
end of the stream. One thread at a time receives; any may send.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from swift_loader.transport.frames import Received

if sys.platform == "win32":
    import subprocess
    from multiprocessing.connection import PipeConnection

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_NBYTES = 1 << 24
"""A long message is sent in parts of this size."""

AnyConnection = Connection
"""On Windows, a `PipeConnection`, which has the same methods."""


def new_pipe() -> tuple[AnyConnection, AnyConnection]:
    """Return the two ends of a new pipe. No other process inherits them."""
    return Pipe(duplex=True)


def inheriting(*ends: AnyConnection) -> dict[str, Any]:
    """Return the arguments of `Popen` that let the new process inherit these ends, under the same numbers."""
    numbers = [end.fileno() for end in ends]
    if sys.platform == "win32":
        for number in numbers:
            os.set_handle_inheritable(number, True)
        return {"startupinfo": subprocess.STARTUPINFO(lpAttributeList={"handle_list": numbers})}
    return {"pass_fds": numbers}


def open_inherited(number: int) -> AnyConnection:
    """Return the end of a pipe that this process has inherited. Its own child processes won't."""
    if sys.platform == "win32":
        os.set_handle_inheritable(number, False)
        return PipeConnection(number)
    os.set_inheritable(number, False)
    return Connection(number)


class PipeChannel:
    """An end of a pipe, with the methods of a `Channel`."""

    def __init__(self, end: AnyConnection) -> None:
        self.end = end
        """For `multiprocessing.connection.wait`."""
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a message; blocks while the pipe is full.

        Raises:
            BrokenPipeError: The peer is gone, or this end is closed. Sometimes this is another OSError.
        """
        with self._sending:
            if self.end.closed:
                raise BrokenPipeError(errno.EPIPE, "the pipe is closed")
            self.end.send_bytes(message)

    def send_long(self, message: NDArray[Any]) -> None:
        """Send `(nbytes,) uint8` in parts, which the peer reads with `receive_long`."""
        for begin in range(0, len(message), CHUNK_NBYTES):
            self.send(message[begin : begin + CHUNK_NBYTES].tobytes())

    def receive(self, *, wait: bool = True) -> Received | None:
        """Return the next message, or None at the end of the stream. Blocks until then, unless `wait` is False.

        Raises:
            BlockingIOError: `wait` is False and there is no message.
        """
        try:
            if not wait and not self.end.poll(0):
                raise BlockingIOError(errno.EAGAIN, "there is no message")
            return Received(memoryview(self.end.recv_bytes()), [])
        except BlockingIOError:
            raise
        except (EOFError, OSError):  # with an OSError if the peer died while it sent, or did not read all we sent
            return None

    def receive_long(self, memory: NDArray[Any]) -> bool:
        """Fill `(nbytes,) uint8` with the parts that the peer sends. Return False if the stream ends before."""
        try:
            for begin in range(0, len(memory), CHUNK_NBYTES):
                self.end.recv_bytes_into(memory[begin : begin + CHUNK_NBYTES].data)
        except (EOFError, OSError):
            return False
        return True

    def fileno(self) -> int:
        """Return the descriptor; -1 after `close`."""
        return -1 if self.end.closed else self.end.fileno()

    def close(self) -> None:
        """Close this end; the peer sees the end of the stream. Idempotent."""
        with suppress(OSError):
            self.end.close()
