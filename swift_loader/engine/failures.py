"""What a failure in another process looks like to the training loop."""

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


def rebuild_samples(
    failed: Iterable[SampleFailed], epoch: int, step: int, who: str, definitions: Definitions, where: str
) -> tuple[SampleFailure, ...]:
    """Return what is known of the samples that a batch does without."""
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
    """Return in words what became of a process."""
    if exit_code is None:
        return "ended; its exit status can't be found out"
    return f"was ended by {_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"


def died(who: str, exit_code: int | None, consequence: str, *, traces: str = "", stderr: str = "") -> WorkerDied:
    """Return the error for a process that ended without being told to.

    Args:
        who: Which process.
        exit_code: As `os.waitstatus_to_exitcode` gives it; None if nobody knows.
        consequence: What that means for the loop.
        traces: What the fault handler wrote, if it crashed.
        stderr: The last lines that it wrote.
    """
    hint = ""
    if exit_code == -signal.SIGKILL:
        hint = ". The kernel sends SIGKILL when memory runs out: see dmesg, and use fewer workers or smaller batches"
    elif exit_code is not None and exit_code < 0:
        hint = ". The code, or a library that it uses, crashed there"
    elif exit_code is not None:
        hint = ". Something in the dataset ends the process: look for sys.exit and os._exit"
    return WorkerDied(f"{who} {how_it_ended(exit_code)}; {consequence}{hint}{attached(traces=traces, stderr=stderr)}")


def attached(*, traces: str = "", stderr: str = "") -> str:
    """Return what a process left in writing, as the end of a message."""
    parts = [("Its Python stack", traces), ("The last lines of its stderr", stderr)]
    return "".join(f"\n{title}:\n{textwrap.indent(text, '    ')}" for title, text in parts if text)


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
