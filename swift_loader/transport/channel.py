"""One end of a private pipe that keeps message boundaries and can carry descriptors.

Guarantees: a message arrives complete or not at all, even if its sender is killed while sending. If the peer dies, the
receiver gets everything that the peer sent, then the end of the stream. Assumes Linux, and one reading thread per end.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from swift_loader.errors import ProtocolError, SwiftLoaderError
from swift_loader.transport.descriptors import avoid_std_streams, new_socketpair, out_of_descriptors_error

__all__ = ["MAX_MESSAGE_BYTES", "Channel", "Received"]

MAX_MESSAGE_BYTES = 64 * 1024
"""Far below the kernel's default limit of 208 KiB, so that several messages fit into the socket's buffer."""

_MAX_DESCRIPTORS = 3
"""A fork request carries three: the channel, stderr, and the pipe for traces."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)

# Plain numbers: combining enum members takes as long as receiving.
_WAIT = int(socket.MSG_CMSG_CLOEXEC)
_CUT_SHORT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_DONT_WAIT = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)


class Received(NamedTuple):
    """A message. `data` is valid until the next `receive` on the same channel."""

    data: memoryview
    descriptors: list[int]
    """Owned by the caller of `receive`."""


class Channel:
    """A connected `SOCK_SEQPACKET` socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return the two ends of a new pipe.

        Raises:
            NoDescriptorsLeft: This process has no file descriptors left.
        """
        one, other = new_socketpair(socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """Return the channel of an inherited or received descriptor. The channel owns it from now on."""
        return cls(socket.socket(fileno=avoid_std_streams(descriptor)))

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one message, with duplicates of the descriptors; blocks while the pipe is full.

        Raises:
            BrokenPipeError: The peer is gone. Sometimes this is a ConnectionResetError.
            ProtocolError: The message is too long.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(message)} bytes is longer than {MAX_MESSAGE_BYTES}")
        if descriptors:
            rights = array.array("i", descriptors)
            self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        else:
            self._socket.send(message)

    def receive(self, *, wait: bool = True) -> Received | None:
        """Return the next message, or None at the end of the stream. Blocks until then, unless `wait` is False.

        Raises:
            BlockingIOError: `wait` is False and there is no message.
            NoDescriptorsLeft: This process has no file descriptors left for those in the message.
            ProtocolError: The message is longer than `MAX_MESSAGE_BYTES`, or carries too many descriptors.
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
        return Received(self._view[:count], _descriptors(ancillary) if ancillary else [])

    def fileno(self) -> int:
        """Return the descriptor, for `poll` and the like; -1 after `close`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the peer sees the end of the stream. Idempotent."""
        self._socket.close()

    def shutdown(self) -> None:
        """End the stream in both directions and wake all threads that wait on either end. Idempotent, thread-safe."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed, or the peer is gone
            return


def _cut_short(happened: int, descriptors: list[int]) -> SwiftLoaderError:
    """Close the descriptors of a truncated message, and return the error for it."""
    for descriptor in descriptors:
        os.close(descriptor)
    if happened & socket.MSG_TRUNC:
        return ProtocolError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")
    if len(descriptors) >= _MAX_DESCRIPTORS:
        return ProtocolError(f"a message has more than {_MAX_DESCRIPTORS} descriptors")
    return out_of_descriptors_error()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    return [avoid_std_streams(descriptor) for descriptor in received]
