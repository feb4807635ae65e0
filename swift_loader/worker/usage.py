"""Measures the CPU time of a worker, and how long it was ready to run but had no core."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

NOT_MEASURED = -1

_LONG_NS = 500_000
"""After a batch that took so long, the run delay is read: 1 us for 500."""

_EVERY = 32
"""After shorter ones, it is read for one batch of so many."""

_MAX_BYTES = 128
"""Of /proc/self/schedstat."""


class ThreadUsage:
    """Measures the calling thread, while it builds a batch. Other threads of the process do other things."""

    def __init__(self) -> None:
        self._began_ns = 0

    def begin(self) -> None:
        """Begin a batch. The same thread ends it."""
        self._began_ns = time.thread_time_ns()

    def end(self, build_ns: int) -> tuple[int, int]:  # noqa: ARG002 - it doesn't depend on it
        """Return the thread's CPU time since `begin`. The run delay isn't measured."""
        return time.thread_time_ns() - self._began_ns, NOT_MEASURED


class ProcessUsage:
    """Measures this process, whose only task is to build batches: from the end of one batch to the end of the next.

    Linux tells the run delay of the main thread alone, in /proc/self/schedstat. Without that file, it isn't measured.
    The process that builds batches makes it, so after a fork. It owns a descriptor from the first reading on.
    """

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        """At the end of the batch before."""
        self._delay_ns = NOT_MEASURED
        """At the end of the batch before, if it was read there."""
        self._num_batches = 0
        self._descriptor: int | None = None
        """None: not opened yet. -1: there is nothing to read."""

    def __enter__(self) -> ProcessUsage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def begin(self) -> None:
        """Do nothing: a batch begins where the one before has ended."""

    def end(self, build_ns: int) -> tuple[int, int]:
        """Return the CPU time and the run delay of a batch."""
        before_ns, self._cpu_ns = self._cpu_ns, time.process_time_ns()
        self._num_batches += 1
        if build_ns < _LONG_NS and self._num_batches % _EVERY > 1:  # two readings in a row make a difference
            self._delay_ns = run_delay_ns = NOT_MEASURED
        else:
            run_delay_ns = self._run_delay_ns()
        return self._cpu_ns - before_ns, run_delay_ns

    def _run_delay_ns(self) -> int:
        """Return the run delay since the batch before; -1 if it wasn't read there, or can't be read."""
        before_ns, self._delay_ns = self._delay_ns, self._read()
        is_known = before_ns != NOT_MEASURED and self._delay_ns >= before_ns
        return self._delay_ns - before_ns if is_known else NOT_MEASURED

    def _read(self) -> int:
        """Return the run delay since the process began; -1 if it can't be read."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open("/proc/self/schedstat", os.O_RDONLY)
            return int(os.pread(self._descriptor, _MAX_BYTES, 0).split()[1]) if self._descriptor >= 0 else NOT_MEASURED
        except (OSError, ValueError, IndexError, AttributeError):  # also if the user's code closed our descriptor
            self._descriptor = -1
            return NOT_MEASURED

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor is not None and descriptor >= 0:
            with suppress(OSError):  # as above
                os.close(descriptor)

    def __repr__(self) -> str:
        return f"<ProcessUsage of {self._num_batches} batches>"


Usage = ThreadUsage | ProcessUsage
