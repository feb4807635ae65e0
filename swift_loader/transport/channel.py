"""Pipes between two processes that keep message boundaries and can carry descriptors, and the descriptors themselves.

Descriptors are never 0, 1 or 2. Some processes, such as daemons, run with their standard streams closed. Then the
kernel gives 0, 1 and 2 to the next files that are opened, and output to stdout or stderr goes into those files. So each
descriptor is moved to 3 or higher as soon as it is created. Other programs don't inherit it, unless it is passed on
explicitly. If there are none left, the error says so.

A message arrives complete or not at all, even if its sender is killed while sending. If the peer dies, the receiver
gets everything that the peer sent, then the end of the stream. Assumes Linux, and one reading thread per end.

`send` waits for room in the pipe. `post` never waits: what the pipe doesn't take stays in the outbox, and whoever waits
for the peer's messages sends it with `flush` once there is room.

A message longer than `MAX_MESSAGE_BYTES` travels in an anonymous file: the pipe carries a mark with the length, and the
file's descriptor behind those of the message. Neither side of the channel sees a difference.

Modules may import this one on Windows, where only what no system lacks can be used.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from swift_loader.errors import NoDescriptorsLeft, ProtocolError, SwiftLoaderError
from swift_loader.transport.messages import Received

_FIRST = 3
"""The first descriptor that isn't a standard stream."""

_SUGGESTED = 1024
"""The default limit of most systems. A loader needs about 10 descriptors, and 6 more for each worker."""


def out_of_descriptors_error(code: int = errno.EMFILE) -> NoDescriptorsLeft:
    """Return the error for a descriptor that can't be opened, with the limit and how to raise it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if code == errno.ENFILE:
        return NoDescriptorsLeft(code, "the system has run out of file descriptors: see /proc/sys/fs/file-max")
    wanted = max(_SUGGESTED, 2 * soft)
    may = "" if hard == resource.RLIM_INFINITY or hard >= wanted else f"; raise the hard limit of {hard} first"
    return NoDescriptorsLeft(
        code,
        f"this process (pid {os.getpid()}) has run out of file descriptors: it may have {soft} of them "
        f"(RLIMIT_NOFILE). A loader needs about 10, and 6 more for each worker. Raise the limit, for example to "
        f"{wanted}: `ulimit -n {wanted}` in the shell, or resource.setrlimit in Python{may}",
    )


@contextmanager
def explaining_limits() -> Iterator[None]:
    """Raise `NoDescriptorsLeft`, which names the limit, if the block fails because descriptors have run out."""
    try:
        yield
    except OSError as error:
        is_explained = isinstance(error, SwiftLoaderError) or error.__cause__ is not None  # with a cause: a worker's
        if error.errno in (errno.EMFILE, errno.ENFILE) and not is_explained and sys.platform != "win32":
            raise out_of_descriptors_error(error.errno) from error
        raise


def avoid_std_streams(descriptor: int) -> int:
    """Return the descriptor itself if it is 3 or higher, else a duplicate that is. Takes ownership of `descriptor`.

    Raises `NoDescriptorsLeft` if no duplicate could be made; `descriptor` is closed then.
    """
    if descriptor >= _FIRST:
        return descriptor
    import fcntl

    try:
        with explaining_limits():
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(descriptor)


def new_eventfd(count: int = 0) -> int:
    """Return a new eventfd. It is readable while its count isn't 0."""
    with explaining_limits():
        return avoid_std_streams(os.eventfd(count, os.EFD_CLOEXEC))


def new_memfd(name: str) -> int:
    """Return a new anonymous file that can be sealed."""
    with explaining_limits():
        return avoid_std_streams(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def new_epoll() -> select.epoll:
    """Return a new epoll object."""
    import fcntl

    with explaining_limits():
        epoll = select.epoll()
        if epoll.fileno() >= _FIRST:
            return epoll
        try:
            return select.epoll.fromfd(fcntl.fcntl(epoll.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST))
        finally:
            epoll.close()


def open_pidfd(pid: int) -> int:
    """Return a new pidfd for a process."""
    with explaining_limits():
        return avoid_std_streams(os.pidfd_open(pid))


def duplicate(descriptor: int) -> int:
    """Return a duplicate of a descriptor, which the caller owns."""
    import fcntl

    with explaining_limits():
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)


def new_pipe() -> tuple[int, int]:
    """Return the two ends of a new pipe: first the one to read from, then the one to write to."""
    with explaining_limits():
        return _both_avoid_std_streams(*os.pipe())


def new_socketpair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Return a new pair of connected Unix sockets."""
    with explaining_limits():
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        first, second = _both_avoid_std_streams(one.detach(), other.detach())
        return socket.socket(socket.AF_UNIX, kind, 0, first), socket.socket(socket.AF_UNIX, kind, 0, second)


def _both_avoid_std_streams(one: int, other: int) -> tuple[int, int]:
    try:
        one = avoid_std_streams(one)
    except BaseException:
        os.close(other)
        raise
    try:
        return one, avoid_std_streams(other)
    except BaseException:
        os.close(one)
        raise


MAX_MESSAGE_BYTES = 64 * 1024
"""Far below the kernel's default limit of 208 KiB, so that several messages fit into the socket's buffer. A longer
message travels in a file."""

MAX_FILE_BYTES = 1 << 30
"""No message is longer: 100 million indices fit. A longer one is a mistake, such as a dataset in a dataset's state."""

MAX_DESCRIPTORS = 3
"""A request to fork has three: the channel, stderr, and the pipe for stacks. A long message has its file besides."""
_MARK = struct.Struct("<12sQ")
"""What is sent for a message in a file: a constant that no frame begins with, and the length."""
_MARK_BEGIN = b"SwL1 in file"

if sys.platform != "win32":
    _ANCILLARY_BYTES = socket.CMSG_SPACE((MAX_DESCRIPTORS + 1) * array.array("i").itemsize)
    # Plain numbers: combining enum members takes as long as receiving.
    _WAIT = int(socket.MSG_CMSG_CLOEXEC)
    _CUT_SHORT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
    _DONT_WAIT = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    _SEND_AT_ONCE = int(socket.MSG_DONTWAIT)

_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a send that may succeed later: the pipe is full, or the kernel is short of memory."""


class Channel:
    """A connected `SOCK_SEQPACKET` socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)
        self.outbox: deque[bytes] = deque()
        """What was posted and not sent yet, in order. One thread at a time posts, and one flushes."""

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return the two ends of a new pipe.

        Raises `NoDescriptorsLeft` if this process has no file descriptors left.
        """
        one, other = new_socketpair(socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """Return the channel of an inherited or received descriptor. The channel owns it from now on."""
        return cls(socket.socket(fileno=avoid_std_streams(descriptor)))

    def detach(self) -> int:
        """Return the descriptor, which the caller owns from now on."""
        return self._socket.detach()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one message, with duplicates of the descriptors; blocks while the pipe is full.

        Raises `BrokenPipeError`, sometimes `ConnectionResetError`, if the peer is gone, `NoDescriptorsLeft` if this
        process has no file descriptor left for a long message, `ProtocolError` if the message is too long.
        """
        self._send(message, descriptors, 0)

    def post(self, message: bytes, *, is_task: bool = False) -> None:  # noqa: ARG002 - others keep what isn't a task
        """Send one message, now or with a later `flush`. Never blocks.

        Raises as `send` does. Then the message was neither sent nor kept.
        """
        if self.outbox or not self._sends_at_once(message):
            self.outbox.append(message)

    def flush(self) -> bool:
        """Send what was posted, as far as there is room. Return whether something is left. Raises as `send` does."""
        while self.outbox and self._sends_at_once(self.outbox[0]):
            self.outbox.popleft()
        return bool(self.outbox)

    def _sends_at_once(self, message: bytes) -> bool:
        """Send a message. Return False if there is no room for it."""
        try:
            if len(message) <= MAX_MESSAGE_BYTES:
                self._socket.send(message, _SEND_AT_ONCE)
            else:
                self._send_in_file(message, (), _SEND_AT_ONCE)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return False
        return True

    def _send(self, message: bytes, descriptors: Sequence[int], flags: int) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            self._send_in_file(message, descriptors, flags)
        elif descriptors:
            rights = array.array("i", descriptors)
            self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], flags)
        else:
            self._socket.send(message, flags)

    def _send_in_file(self, message: bytes, descriptors: Sequence[int], flags: int) -> None:
        if len(message) > MAX_FILE_BYTES:
            raise ProtocolError(f"a message of {len(message)} bytes is longer than {MAX_FILE_BYTES}")
        file = new_memfd("swift_loader_message")
        try:
            rest = memoryview(message)
            while rest:
                rest = rest[os.write(file, rest) :]
            self._send(_MARK.pack(_MARK_BEGIN, len(message)), [*descriptors, file], flags)
        finally:
            os.close(file)

    def receive(self, *, wait: bool = True) -> Received | None:
        """Return the next message, or None at the end of the stream. Blocks until then, unless `wait` is False.

        Raises `BlockingIOError` if `wait` is False and there is no message, `NoDescriptorsLeft` if this process has no
        file descriptors left for those in the message, `ProtocolError` if the message is too long, carries too many
        descriptors, or is cut short.
        """
        flags = _WAIT if wait else _DONT_WAIT
        while True:
            try:
                count, ancillary, happened, _ = self._socket.recvmsg_into([self._view], _ANCILLARY_BYTES, flags)
            except ConnectionResetError:
                # The peer closed its end before it had read all our messages. The kernel reports that once, before the
                # messages that the peer sent. Those come with the next call.
                continue
            break
        if happened & _CUT_SHORT:
            raise _cut_short(happened, _descriptors(ancillary))
        if count == 0:
            return None
        if not ancillary:
            return Received(self._view[:count], [])
        received = Received(self._view[:count], _descriptors(ancillary))
        is_in_file = count == _MARK.size and received.data[: len(_MARK_BEGIN)] == _MARK_BEGIN
        return _from_file(received) if is_in_file else received

    def fileno(self) -> int:
        """Return the descriptor, for `poll` and the like; -1 after `close`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the peer sees the end of the stream. Idempotent."""
        self._socket.close()

    def shutdown(self, *, receives: bool = False) -> None:
        """End the stream in both directions, and wake all threads that wait on either end. Idempotent, thread-safe.

        `receives`: end only the stream to the peer.
        """
        with suppress(OSError):  # closed, or the peer is gone
            self._socket.shutdown(socket.SHUT_WR if receives else socket.SHUT_RDWR)


def _cut_short(happened: int, descriptors: list[int]) -> SwiftLoaderError:
    """Close the descriptors of a truncated message, and return the error for it."""
    for descriptor in descriptors:
        os.close(descriptor)
    if happened & socket.MSG_TRUNC:
        return ProtocolError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")
    if len(descriptors) > MAX_DESCRIPTORS:
        return ProtocolError(f"a message has more than {MAX_DESCRIPTORS + 1} descriptors")
    return out_of_descriptors_error()


def _from_file(mark: Received) -> Received:
    """Return the message that a mark announces. Raises `ProtocolError` if the file has another length."""
    *descriptors, file = mark.descriptors
    _, length = _MARK.unpack(mark.data)
    try:
        size = os.fstat(file).st_size
        message = bytearray(size if size == length <= MAX_FILE_BYTES else 0)
        view, position = memoryview(message), 0
        while position < len(view) and (count := os.preadv(file, [view[position:]], position)):
            position += count
    finally:
        os.close(file)
    if position != length:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(f"a message of {length} bytes came in a file of {size}, at most {MAX_FILE_BYTES} may come")
    return Received(view, descriptors)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    return [avoid_std_streams(descriptor) for descriptor in received]
