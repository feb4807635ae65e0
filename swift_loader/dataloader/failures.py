"""Begins the text of a failure of the workers as torch's: programs and log filters look for that."""

from __future__ import annotations

import re
import signal

from swift_loader.errors import ForkHangs, SwiftLoaderError, WorkerDied, WorkerStalled

_PID = re.compile(r"\bpid (\d+)")
_SIGNAL = re.compile(r"\bwas ended by (SIG\w+)")


def lost_batch() -> SwiftLoaderError:
    """Return the error for a loop that can't continue after an interrupt."""
    return SwiftLoaderError(
        "a batch is lost because a signal handler raised an exception that interrupted the loop while it took the "
        "batch. Begin a new epoch"
    )


def with_torch_text(error: BaseException, timeout_s: float) -> BaseException:
    """Return the same error with what torch says in front, if it is about a worker that died or took too long."""
    told: BaseException
    if isinstance(error, WorkerStalled):
        told = WorkerStalled(f"DataLoader timed out after {timeout_s:g} seconds: {error}")
    elif isinstance(error, WorkerDied) and not isinstance(error, ForkHangs):
        told = WorkerDied(f"{_torch_text(str(error))}: {error}")
    else:
        return error
    told.__cause__ = error.__cause__
    return told


def _torch_text(text: str) -> str:
    pid, ended_by = _PID.search(text), _SIGNAL.search(text)
    if pid is None:
        return "DataLoader worker exited unexpectedly"
    if ended_by is None:
        return f"DataLoader worker (pid(s) {pid[1]}) exited unexpectedly"
    name = signal.strsignal(signal.Signals[ended_by[1]])
    return f"DataLoader worker (pid {pid[1]}) is killed by signal: {name}"
