"""What a failure in another process looks like to the training loop."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import numpy as np

from swift_loader.errors import RemoteTraceback, WorkerDied, WorkerError
from swift_loader.transport.codec import decode
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.messages import Failure

__all__ = ["describe_batch", "died", "rebuild"]

_MAX_SHOWN_INDICES = 8


def rebuild(failure: Failure, who: str, definitions: Definitions, where: str = "") -> Exception:
    """Return the exception to raise for a failure of the user's code.

    It has the type it had in the worker if it survived the way here, and is a `WorkerError` otherwise. Its `__cause__`
    tells who, where and how.
    """
    place = f", dataset index {failure.index}" if failure.index is not None else ""
    context = f"In {who}, {failure.stage.value}{place}{where}:"
    error: Exception | None = None
    if failure.pickled is not None:
        try:
            meta, memory = memoryview(failure.pickled), np.empty(0, np.uint8)
            rebuilt = decode(meta, failure.num_blocks, memory, definitions)
        except Exception:  # it could be rebuilt there, but not here: then its text has to do
            rebuilt = None
        error = rebuilt if isinstance(rebuilt, Exception) else None
    if error is None:
        error = WorkerError(f"{context} {failure.type_name}: {failure.message}")
    error.__cause__ = RemoteTraceback(f"{context}\n\n{failure.traceback}")
    return error


def died(who: str, exit_code: int | None, consequence: str) -> WorkerDied:
    """Return the error for a process that ended without being told to."""
    if exit_code is None:
        how = "ended; its exit status can't be found out"
    elif exit_code < 0:
        how = f"was ended by {_signal_name(-exit_code)}"
    else:
        how = f"exited with code {exit_code}"
    hint = ""
    if exit_code == -signal.SIGKILL:
        hint = ". The kernel sends SIGKILL when memory runs out: see dmesg, and use fewer workers or smaller batches"
    elif exit_code is not None and exit_code < 0:
        hint = ". Set PYTHONFAULTHANDLER=1 to see where a crash happens"
    elif exit_code is not None:
        hint = ". Something in the dataset ends the process: look for sys.exit and os._exit"
    return WorkerDied(f"{who} {how}; {consequence}{hint}")


def describe_batch(epoch: int, step: int, indices: Sequence[int]) -> str:
    """Return which batch it is, and which samples it is made of."""
    shown = ", ".join(str(index) for index in indices[:_MAX_SHOWN_INDICES])
    more = f", ... {len(indices)} in all" if len(indices) > _MAX_SHOWN_INDICES else ""
    return f"batch {step} of epoch {epoch} (dataset indices {shown}{more})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
