"""Python stacks on demand: what a process that hangs or crashes can still tell about itself.

A thread writes them when the trainer asks: a signal could do so, too, but it would interrupt system calls of C code
that isn't prepared for it, and so make samples fail that are just slow. It is for processes that are to be killed
anyway, and gets through also where C code keeps the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading

from swift_loader.transport.descriptors import new_eventfd

__all__ = ["DUMP_SIGNAL", "Traces"]

DUMP_SIGNAL = signal.SIGURG
"""Ignored by default: it does no harm to a process that isn't ready for it."""


class Traces:
    """Writes the stacks of all threads to a socket: when a byte comes in, at a `DUMP_SIGNAL`, and at a fatal signal."""

    def __init__(self, descriptor: int) -> None:
        """Get ready to answer signals.

        Args:
            descriptor: Must stay open. Made non-blocking by the trainer, so that it never holds up the process.
        """
        self._descriptor = descriptor
        self._stop = -1
        self._thread: threading.Thread | None = None
        faulthandler.enable(file=descriptor)
        faulthandler.register(DUMP_SIGNAL, file=descriptor)

    @property
    def descriptors(self) -> list[int]:
        """Those in use."""
        return [self._descriptor, *([self._stop] if self._thread is not None else [])]

    @property
    def thread_ids(self) -> list[int]:
        """The kernel's number of the thread, while there is one."""
        number = self._thread.native_id if self._thread is not None else None
        return [] if number is None else [number]

    def start(self) -> None:
        """Begin to answer what the trainer asks, on a thread."""
        self._stop = new_eventfd()
        self._thread = threading.Thread(target=self._serve, name="swift_loader-traces", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: before the process is forked."""
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._thread = None

    def _serve(self) -> None:
        poll = select.poll()  # select(2) can't wait for descriptors beyond 1,023
        for descriptor in (self._descriptor, self._stop):
            poll.register(descriptor, select.POLLIN)
        while True:
            readable = [descriptor for descriptor, _ in poll.poll()]
            if self._stop in readable or not os.read(self._descriptor, 1):
                return
            faulthandler.dump_traceback(file=self._descriptor)
