"""Python stacks on demand: what a process that hangs or crashes can still tell about itself.

The interpreter's fault handler writes them from within the signal's handler, without the GIL, also while the main
thread is blocked in C code; it can't where the process is stopped or waits in the kernel uninterruptibly.
"""

from __future__ import annotations

import faulthandler
import signal

__all__ = ["DUMP_SIGNAL", "install_traces"]

DUMP_SIGNAL = signal.SIGURG
"""Ignored by default: it does no harm to a process that isn't ready for it."""


def install_traces(descriptor: int) -> None:
    """Have stacks written to a pipe: of all threads at a `DUMP_SIGNAL`, and when a fatal signal ends the process.

    Args:
        descriptor: Must stay open. Made non-blocking by the trainer, so that a full pipe never holds up the process.
    """
    faulthandler.enable(file=descriptor)
    faulthandler.register(DUMP_SIGNAL, file=descriptor)
