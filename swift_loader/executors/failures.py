"""Turns a failure in another process into an exception for the training loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swift_loader.errors import RemoteTraceback, WorkerError
from swift_loader.scheduler.sample_errors import SampleFailure
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode
from swift_loader.transport.messages import Failure, SampleFailed

__all__ = ["describe_batch", "rebuild", "rebuild_sample"]

_MAX_SHOWN_INDICES = 8


def rebuild(failure: Failure, who: str, definitions: Definitions, where: str = "") -> Exception:
    """Return the exception for a failure of the user's code.

    It has the same type as in the worker if it can be rebuilt here; otherwise it is a `WorkerError`. Its `__cause__`
    holds the process, the batch and the traceback.
    """
    sample = f", dataset index {failure.index}" if failure.index is not None else ""
    context = f"In {who}, {failure.stage.value}{sample}{where}:"
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


def rebuild_sample(failed: SampleFailed, epoch: int, step: int, exception: Exception) -> SampleFailure:
    """Return the record of a failed sample of a batch, given its rebuilt exception."""
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


def describe_batch(epoch: int, step: int, indices: Sequence[int]) -> str:
    """Return the number of a batch, its epoch and its dataset indices, for a message."""
    shown = ", ".join(str(index) for index in indices[:_MAX_SHOWN_INDICES])
    more = f", ... {len(indices)} in all" if len(indices) > _MAX_SHOWN_INDICES else ""
    return f"batch {step} of epoch {epoch} (dataset indices {shown}{more})"
