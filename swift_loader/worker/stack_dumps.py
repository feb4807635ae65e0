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
import threading

from swift_loader.transport.descriptors import new_eventfd

__all__ = ["DUMP_SIGNAL", "StackDumper"]

DUMP_SIGNAL = signal.SIGURG
"""Ignored by default, so it does no harm to a process without the handler."""


class StackDumper:
    """Writes the stacks of all threads to a socket: when a byte arrives, on `DUMP_SIGNAL`, and on a fatal signal."""

    def __init__(self, descriptor: int) -> None:
        """Install the handlers of the signals.

        Args:
            descriptor: The socket; must stay open. The trainer has made it non-blocking, so writing never blocks.
        """
        self._descriptor = descriptor
        self._stop = -1
        self._thread: threading.Thread | None = None
        faulthandler.disable()  # if it is enabled, enabling it again leaves handlers that a library has set since
        faulthandler.enable(file=descriptor)
        faulthandler.register(DUMP_SIGNAL, file=descriptor)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors in use."""
        return [self._descriptor, *([self._stop] if self._thread is not None else [])]

    @property
    def thread_ids(self) -> list[int]:
        """The kernel's id of the thread; empty if there is no thread."""
        number = self._thread.native_id if self._thread is not None else None
        return [] if number is None else [number]

    def start(self) -> None:
        """Start a thread that answers the trainer's requests."""
        self._stop = new_eventfd()
        self._thread = threading.Thread(target=self._serve, name="swift_loader-traces", daemon=True)
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
        for descriptor in (self._descriptor, self._stop):
            poll.register(descriptor, select.POLLIN)
        while True:
            readable = [descriptor for descriptor, _ in poll.poll()]
            if self._stop in readable or not os.read(self._descriptor, 1):
                return
            faulthandler.dump_traceback(file=self._descriptor)
