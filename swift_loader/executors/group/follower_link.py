"""The connection of the rank that loads to one rank that shares its batches.

    send ──► socket, or the backlog while the socket is full ──flush──► socket
    receive ◄── TAKEN, AWAITED

Guarantees: sending never waits, and keeps the order. The epoll object reports room in the socket only while there is a
backlog.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from swift_loader.executors.group.messages import Taken
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.lease import LeasedMemory
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import duplicate
from swift_loader.transport.frames import Frame, unpack_frame

__all__ = ["FollowerLink"]

_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
"""Sending fails with these once the other side or this one is closed. Others mean that the message is lost."""


class FollowerLink:
    """A rank that shares the batches. The caller of each method holds the lock of the `GroupLeader`."""

    def __init__(self, process: int, channel: Channel, epoll: select.epoll) -> None:
        """Listen to a rank.

        Args:
            process: The rank.
            channel: To it. This object owns it.
            epoll: Reports what the rank sends. The caller owns it.
        """
        self.process = process
        self.held: dict[int, LeasedMemory] = {}
        """What the rank hasn't released, by segment number."""
        self._channel = channel
        self._epoll = epoll
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        """Messages that didn't fit into the socket, with descriptors that this object owns."""
        FORKS.keep_from_children(channel)
        epoll.register(channel.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor of the channel; -1 once closed. Needs no lock."""
        return self._channel.fileno()

    # Sending ----------------------------------------------------------------------------------------------------------

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Send a message, or keep it until there is room in the socket. The caller keeps the descriptor.

        Raises:
            OSError: It can't be sent, for example because there are no file descriptors left. The rank isn't gone.
        """
        descriptors = [] if descriptor is None else [descriptor]
        if not self._backlog and self._try_send(message, descriptors):
            return
        self._backlog.append((message, [duplicate(number) for number in descriptors]))
        if len(self._backlog) == 1 and self._channel.fileno() >= 0:
            self._epoll.modify(self._channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _try_send(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """Return False if there is no room. If the rank is gone, `receive` tells."""
        try:
            self._channel.send(message, descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _GONE:
                raise
        return True

    def flush(self) -> None:
        """Send as much of the backlog as there is room for. Raises the same as `send`."""
        while self._backlog:
            message, descriptors = self._backlog[0]
            if not self._try_send(message, descriptors):
                return
            self._backlog.popleft()
            _close_all(descriptors)
        if self._channel.fileno() >= 0 and not self._epoll.closed:
            self._epoll.modify(self._channel.fileno(), select.EPOLLIN)

    def flush_until(self, deadline_s: float) -> None:
        """Send the backlog. Blocks until that is done, the rank is gone, or `time.monotonic()` is so late."""
        poll = select.poll()
        if self._backlog:
            poll.register(self._channel.fileno(), select.POLLOUT)
        while self._backlog and poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            before = len(self._backlog)
            with suppress(OSError):
                self.flush()
            if len(self._backlog) == before:
                return

    # Receiving --------------------------------------------------------------------------------------------------------

    def receive(self) -> Frame | None:
        """Return the next message; None if the rank is gone. Its body is valid until the next call.

        Raises:
            BlockingIOError: There is none.
            ProtocolError: It is malformed.
        """
        received = self._channel.receive(wait=False)
        if received is None:
            return None
        _close_all(received.descriptors)  # no message of such a rank needs any
        return unpack_frame(received.data)

    def give_back(self, taken: Taken) -> None:
        """Release the slots that the rank doesn't use any more."""
        for number in taken.retired:
            if (held := self.held.get(number)) is not None:
                held.retire()
        for number in (*taken.released, *taken.retired):
            self.held.pop(number, None)

    def close(self) -> None:
        """Close the channel, drop the backlog, and release all slots. Idempotent."""
        if self._channel.fileno() >= 0 and not self._epoll.closed:
            self._epoll.unregister(self._channel.fileno())
        self._channel.close()
        self.held.clear()
        while self._backlog:
            _close_all(self._backlog.popleft()[1])

    def __repr__(self) -> str:
        return f"<FollowerLink to rank {self.process}, {len(self.held)} slots held, {len(self._backlog)} unsent>"


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
