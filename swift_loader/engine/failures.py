"""Turns a failure in another process into an exception for the training loop."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterable, Sequence

import numpy as np

from swift_loader.bad_samples import SampleFailure
from swift_loader.errors import RemoteTraceback, WorkerDied, WorkerError
from swift_loader.transport.codec import decode
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.messages import Failure, SampleFailed

__all__ = ["attached", "describe_batch", "died", "how_it_ended", "rebuild", "rebuild_samples"]

_MAX_SHOWN_INDICES = 8


def rebuild(failure: Failure, who: str, definitions: Definitions, where: str = "") -> Exception:
    """Return the exception for a failure of the user's code.

    It has the same type as in the worker if it can be rebuilt here; otherwise it is a `WorkerError`. Its `__cause__`
    holds the process, the batch and the traceback.
    """
    place = f", dataset index {failure.index}" if failure.index is not None else ""
    context = f"In {who}, {failure.stage.value}{place}{where}:"
    error: Exception | None = None
    if failure.pickled is not None:
        try:
            meta, memory = memoryview(failure.pickled), np.empty(0, np.uint8)
            rebuilt = decode(meta, failure.num_blocks, memory, definitions)
        except Exception:  # it can be pickled there but not rebuilt here, so only its text is left
            rebuilt = None
        error = rebuilt if isinstance(rebuilt, Exception) else None
    if error is None:
        error = WorkerError(f"{context} {failure.type_name}: {failure.message}")
    error.__cause__ = RemoteTraceback(f"{context}\n\n{failure.traceback}")
    return error


def rebuild_samples(
    failed: Iterable[SampleFailed], epoch: int, step: int, who: str, definitions: Definitions, where: str
) -> tuple[SampleFailure, ...]:
    """Return a record for each failed sample of a batch."""
    return tuple(_rebuild_sample(one, epoch, step, rebuild(one.failure, who, definitions, where)) for one in failed)


def _rebuild_sample(failed: SampleFailed, epoch: int, step: int, exception: Exception) -> SampleFailure:
    failure = failed.failure
    assert failure.index is not None
    return SampleFailure(
        epoch=epoch,
        step=step,
        index=failure.index,
        exception=exception,
        reason=f"{failure.type_name}: {failure.message}",
        traceback=failure.traceback,
        replaced_by=failed.replaced_by,
        position=failed.position,
    )


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a process ended."""
    if exit_code is None:
        return "ended with an unknown exit status"
    return f"was ended by {_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"


def died(who: str, exit_code: int | None, consequence: str, *, traces: str = "", stderr: str = "") -> WorkerDied:
    """Return the error for a process that died.

    Args:
        who: Which process.
        exit_code: As from `os.waitstatus_to_exitcode`; None if it is unknown.
        consequence: What it means for the loop.
        traces: Output of the fault handler, if it crashed.
        stderr: The last lines of its stderr.
    """
    hint = ""
    if exit_code == -signal.SIGKILL:
        hint = ". The kernel sends SIGKILL when memory runs out: see dmesg, and use fewer workers or smaller batches"
    elif exit_code is not None and exit_code < 0:
        hint = ". The dataset's code, or a library that it uses, crashed"
    elif exit_code is not None:
        hint = ". The dataset's code ended the process: look for sys.exit and os._exit"
    return WorkerDied(f"{who} {how_it_ended(exit_code)}; {consequence}{hint}{attached(traces=traces, stderr=stderr)}")


def attached(*, traces: str = "", stderr: str = "") -> str:
    """Return a process's stack and stderr as the end of a message; empty if there are none."""
    parts = [("Its Python stack", traces), ("The last lines of its stderr", stderr)]
    return "".join(f"\n{title}:\n{textwrap.indent(text, '    ')}" for title, text in parts if text)


def describe_batch(epoch: int, step: int, indices: Sequence[int]) -> str:
    """Return the number of a batch, its epoch and its dataset indices, for a message."""
    shown = ", ".join(str(index) for index in indices[:_MAX_SHOWN_INDICES])
    more = f", ... {len(indices)} in all" if len(indices) > _MAX_SHOWN_INDICES else ""
    return f"batch {step} of epoch {epoch} (dataset indices {shown}{more})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
