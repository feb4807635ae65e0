"""Writes Python stacks on demand, for processes that hang or crash.

A thread writes the stacks when the trainer asks. A signal also works, even while C code holds the GIL. But it would
interrupt system calls of C code that doesn't handle that, and so make slow samples fail. So the signal is only for
processes that are about to be killed.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import struct
import threading

from swift_loader.threads import LoaderThread
from swift_loader.transport.descriptors import avoid_std_streams, duplicate, new_eventfd

DUMP_SIGNAL = signal.SIGURG
"""Ignored by default, so it does no harm to a process without the handler."""

_FD = struct.Struct("i")

_DONT_WAIT = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT


class StackDumper:
    """Writes the stacks of all threads to a pipe: when the trainer asks, on `DUMP_SIGNAL`, and on a fatal signal."""

    def __init__(self, descriptor: int) -> None:
        """Install the handlers of the signals.

        `descriptor`: the socket over which the trainer asks: with a byte. The first one brings the pipe. Both must stay
        open. The trainer has made them non-blocking, so writing never blocks.
        """
        self._asked = descriptor
        self._traces = _take_pipe(descriptor)
        self._stop = -1
        self._thread: threading.Thread | None = None
        faulthandler.disable()  # if it is enabled, enabling it again leaves handlers that a library has set since
        faulthandler.enable(file=self._traces)
        faulthandler.register(DUMP_SIGNAL, file=self._traces)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors in use."""
        return [*{self._asked, self._traces}, *([self._stop] if self._thread is not None else [])]

    @property
    def thread_ids(self) -> list[int]:
        """The kernel's id of the thread; empty if there is no thread."""
        number = self._thread.native_id if self._thread is not None else None
        return [] if number is None else [number]

    def start(self) -> None:
        """Start a thread that answers the trainer's requests."""
        self._stop = new_eventfd()
        self._thread = LoaderThread(self._serve, "traces")
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Call it before the process is forked. Idempotent."""
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._thread = None

    def _serve(self) -> None:
        poll = select.poll()  # select(2) can't wait for descriptors above 1,023
        for descriptor in (self._asked, self._stop):
            poll.register(descriptor, select.POLLIN)
        while True:
            readable = [descriptor for descriptor, _ in poll.poll()]
            if self._stop in readable or not os.read(self._asked, 1):
                return
            faulthandler.dump_traceback(file=self._traces)


def _take_pipe(descriptor: int) -> int:
    """Return the pipe's end that lies in a socket. The socket itself, which holds less, if there is none."""
    with socket.socket(fileno=duplicate(descriptor)) as asked:
        try:  # `socket.recv_fds` ignores its flags
            _, ancillary, _, _ = asked.recvmsg(1, socket.CMSG_SPACE(_FD.size), _DONT_WAIT)
        except BlockingIOError:
            return descriptor
    if not ancillary:  # no descriptor was left for it
        return descriptor
    return avoid_std_streams(*_FD.unpack(ancillary[0][2][: _FD.size]))
