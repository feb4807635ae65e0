"""What workers use on systems that can't send a descriptor to another process: shared memory with names, and pipes.

The worker creates a segment and announces it. The trainer attaches it and removes its name at once. From then on the
memory lives as long as its mappings. The names of a worker are numbered. So the trainer also finds the one that the
worker created but couldn't announce, because it was killed.

On Windows this is `multiprocessing.shared_memory`; there a name lasts as long as its mappings. Elsewhere it is made of
the same functions. The class itself would start a resource tracker there, which is a further process for the trainer
and for each worker, and which removes names that are still in use (always before Python 3.13).
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from swift_loader.errors import SharedMemoryFull
from swift_loader.runtime import blocked
from swift_loader.transport.messages import Received
from swift_loader.transport.segments import SHARED, Segment, reserving_failed

# Pipes that every system has: connections of `multiprocessing`, of which a new process inherits an end.
#
# A message arrives complete or not at all. If the peer dies, the receiver gets everything that the peer sent, then the
# end of the stream. One thread at a time receives; any may send.

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
        self._posted: SimpleQueue[bytes | None] = SimpleQueue()

    def send(self, message: bytes) -> None:
        """Send a message; blocks while the pipe is full.

        Raises `BrokenPipeError`, sometimes another `OSError`, if the peer is gone, or this end is closed.
        """
        with self._sending:
            if self.end.closed:
                raise BrokenPipeError(errno.EPIPE, "the pipe is closed")
            with _without_sigpipe():
                self.end.send_bytes(message)

    outbox = ()
    """Nothing waits for whoever listens, see `Channel`."""

    def post(self, message: bytes) -> None:
        """Have the thread that runs `send_posted` send a message. Never blocks."""
        self._posted.put(message)

    def send_posted(self) -> None:
        """Send what is posted, until `close`, or until the peer is gone."""
        with suppress(OSError, TypeError):  # with a TypeError if it is closed while the rest of a message is sent
            while (message := self._posted.get()) is not None:
                self.send(message)

    def send_long(self, message: NDArray[Any]) -> None:
        """Send `(nbytes,) uint8` in parts, which the peer reads with `receive_long`."""
        for begin in range(0, len(message), CHUNK_NBYTES):
            self.send(message[begin : begin + CHUNK_NBYTES].tobytes())

    def receive(self, *, wait: bool = True) -> Received | None:
        """Return the next message, or None at the end of the stream. Blocks until then, unless `wait` is False.

        Raises `BlockingIOError` if `wait` is False and there is no message.
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
        self._posted.put(None)
        with suppress(OSError):
            self.end.close()


@contextmanager
def _without_sigpipe() -> Iterator[None]:
    """Have a write raise if the peer is gone, also in a program that SIGPIPE would end."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN:  # ignored, as Python starts
        yield
        return
    with blocked({signal.SIGPIPE}):
        try:
            yield
        finally:
            if signal.SIGPIPE in signal.sigpending():
                signal.sigwait({signal.SIGPIPE})


if sys.platform == "win32":
    from multiprocessing.shared_memory import SharedMemory
else:
    import _posixshmem  # type: ignore[import-not-found] # typeshed has no stub

_CHUNK = bytes(1 << 16)

_LIMIT = "the size of /dev/shm, or the memory that the process may use"


class SegmentNames:
    """The names of one worker's segments. macOS allows 31 characters."""

    def __init__(self, prefix: str = "") -> None:
        """Use this prefix; by default a new one that nobody else has. It has the number of this process."""
        self.prefix = prefix or f"swl_{os.getpid()}_{secrets.token_hex(4)}"

    def of(self, slot: int | None) -> str:
        """Return the name of a slot's segment; of the page of counters, if it is None."""
        return f"{self.prefix}_{'c' if slot is None else slot}"

    def unlink_from(self, slot: int) -> None:
        """Remove the names of this slot, of all later ones and of the counters, as far as they exist."""
        unlink(self.of(None))
        while unlink(self.of(slot)):
            slot += 1


def create(name: str, nbytes: int) -> Segment:
    """Return a new segment.

    Raises `SharedMemoryFull` if there is not enough memory, or there are no file descriptors left.
    """
    if sys.platform == "win32":
        memory = SharedMemory(name, create=True, size=nbytes)
        return _map_shared(memory, nbytes)
    try:
        descriptor = _posixshmem.shm_open(f"/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    except OSError as error:
        needs = "It needs a free file descriptor, and a /dev/shm that this process may write to"
        raise SharedMemoryFull(error.errno, f"no shared memory can be made: {error.strerror}. {needs}") from None
    try:
        _reserve(descriptor, nbytes)
        return Segment.map(descriptor, nbytes, SHARED)
    except BaseException:
        unlink(name)
        raise
    finally:
        os.close(descriptor)


def attach(name: str, nbytes: int) -> Segment:
    """Return a mapping of another process's segment, and remove its name.

    Raises `FileNotFoundError` if the process that created it has ended, `SharedMemoryFull` if the mapping failed, or
    the segment is smaller than `nbytes`.
    """
    if sys.platform == "win32":
        memory = SharedMemory(name)
        return _map_shared(memory, nbytes)
    descriptor = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
    unlink(name)
    return Segment.attach(descriptor, nbytes)


def unlink(name: str) -> bool:
    """Remove a name. Return whether there was such a name, and it could be removed. On Windows, do nothing."""
    if sys.platform != "win32":
        with suppress(OSError):
            _posixshmem.shm_unlink(f"/{name}")
            return True
    return False


def _map_shared(memory: Any, nbytes: int) -> Segment:
    """Return the segment of a `SharedMemory`, which it closes."""
    return Segment(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory.buf)), nbytes, memory.close)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Set a segment's size and reserve its pages, where the system lets one write to the descriptor.

    Else a process that writes to the mapping would end by SIGBUS when memory runs out. macOS has no such limit, and
    refuses the write.
    """
    try:
        os.ftruncate(descriptor, nbytes)
        left = nbytes
        while left > 0:
            left -= os.write(descriptor, _CHUNK[:left])
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            raise reserving_failed(error, nbytes, _LIMIT) from None
        if os.fstat(descriptor).st_size < nbytes:
            raise
