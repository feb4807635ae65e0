"""Turns a failure in another process into an exception for the training loop."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from swift_loader.errors import RemoteTraceback, WorkerError, set_cause
from swift_loader.sampling.plan import Plan
from swift_loader.sampling.work import IndexWork, StreamWork, Work
from swift_loader.scheduler.messages import Send
from swift_loader.scheduler.sample_errors import SampleFailure
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode
from swift_loader.transport.messages import Failure, SampleFailed
from swift_loader.transport.task import IndexArray, Task

# The message that asks for a work.


def task_of(send: Send, released: Sequence[int] = (), retired: Sequence[int] = ()) -> Task:
    """Return the task that asks a worker for what the scheduler sends it."""
    work = send.work
    indices = work.indices if isinstance(work, IndexWork) else None
    turn = work.turn if isinstance(work, StreamWork) else None
    return Task(send.generation, send.sequence, work.epoch, work.step, indices, released, retired, turn)


_MAX_SHOWN_INDICES = 8
_MAX_SHOWN_CHARACTERS = 40
"""Of a key that isn't a number."""


def rebuild(failure: Failure, who: str, definitions: Definitions, where: str = "") -> Exception:
    """Return the exception for a failure of the user's code.

    It has the same type as in the worker if it can be rebuilt here; otherwise it is a `WorkerError`. Its `__cause__`
    holds the process, the batch and the traceback.
    """
    sample = f", dataset index {failure.index}" if failure.index is not None else ""
    return rebuild_with(failure, f"In {who}, {failure.stage.value}{sample}{where}:", definitions)


def rebuild_with(failure: Failure, context: str, definitions: Definitions) -> Exception:
    """Return the same as `rebuild`, with this text in front of the traceback."""
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
    set_cause(error, RemoteTraceback(f"{context}\n\n{failure.traceback}"))
    return error


def place_of(work: Work, rank: int, worker_id: int | None, index: int | None) -> str:
    """Return where the user's code raised, for `noted`. None: there are no workers; it isn't at a sample."""
    batch = f"{work.turn} of its shard of the stream" if isinstance(work, StreamWork) else work.step
    facts = {"rank": rank, "worker": worker_id, "epoch": work.epoch, "batch": batch, "dataset index": index}
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def rebuild_sample(failed: SampleFailed, work: Work, exception: Exception) -> SampleFailure:
    """Return the record of a failed sample of a batch, given its rebuilt exception."""
    failure = failed.failure
    index: Any = failure.index
    if index is None and isinstance(work, IndexWork):  # only integers are sent
        keys = work.indices if isinstance(work.indices, (list, tuple)) else [work.indices]
        index = keys[failed.position] if failed.position < len(keys) else None
    return SampleFailure(
        epoch=work.epoch,
        step=work.step,
        index=index,
        exception=exception,
        reason=f"{failure.type_name}: {failure.message}",
        traceback=failure.traceback,
        replaced_by=failed.replaced_by,
        position=failed.position,
    )


def keys_of(work: Work, plan: Plan) -> Sequence[Any]:
    """Return the dataset indices of a batch, or other keys; none if it is of a stream, or if unknown."""
    if isinstance(work, StreamWork):
        return []
    if isinstance(work, IndexWork):
        keys = work.indices.to_list() if isinstance(work.indices, IndexArray) else work.indices
        return keys if isinstance(keys, (list, tuple)) else [keys]
    if work.step >= plan.num_batches(work.epoch):  # the loop has just begun with another plan
        return []
    indices: list[int] = plan.batch(work.epoch, work.step).indices.tolist()
    return indices


def describe_work(work: Work, plan: Plan) -> str:
    """Return which batch a work is, for a message."""
    if isinstance(work, StreamWork):
        return f"batch {work.turn} of its shard of the stream, in epoch {work.epoch}"
    keys = keys_of(work, plan)
    more = f", ... {len(keys)} in all" if len(keys) > _MAX_SHOWN_INDICES else ""
    first = ", ".join(map(shown, keys[:_MAX_SHOWN_INDICES]))
    described = f"batch {work.step} of epoch {work.epoch} (dataset indices {first}{more})"
    if isinstance(work, IndexWork) or (number := plan.number_in_epoch(work.epoch, work.step)) == work.step:
        return described
    return f"{described}, which is step {number} if the skipped ones count"


def shown(key: Any) -> str:
    """Return a key for a message: a number as it is, a short text, or the type of anything else."""
    if isinstance(key, (int, np.integer)):
        return str(key)
    if not isinstance(key, str):
        return f"<{type(key).__name__}>"
    return repr(key if len(key) <= _MAX_SHOWN_CHARACTERS else key[:_MAX_SHOWN_CHARACTERS] + "...")


# What another process wrote to stderr ---------------------------------------------------------------------------------

_UNREAD_S = 0.2
"""How long to wait for a trainer's stderr that is full."""
_PIPE_BUF = getattr(select, "PIPE_BUF", 512)
"""A pipe that can be written takes so many bytes at once; Windows doesn't say."""


_MAX_KEPT_NBYTES = 16 * 1024
_MAX_SHOWN_NBYTES = 4096
_MAX_LINES = 20
"""How much of stderr an error shows, unless it is a crash."""

_CRASH = b"Fatal Python error"
"""How the fault handler begins. What it writes is shown from there on."""


class StderrTail:
    """The end of what another process writes to stderr. One thread adds to it; any thread reads it."""

    def __init__(self) -> None:
        self._kept = b""

    def add(self, data: bytes) -> None:
        """Keep the end, and pass on all of it to this process's stderr."""
        self._kept = (self._kept + data)[-_MAX_KEPT_NBYTES:]
        write_stderr(data)

    def last_lines(self) -> str:
        """Return the last lines, as printable text."""
        lines = self._kept.splitlines()
        crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), None)
        if crash is None:
            return readable(self._kept[-_MAX_SHOWN_NBYTES:].splitlines()[-_MAX_LINES:])
        return readable(lines[min(crash, max(0, len(lines) - _MAX_LINES)) :])


def readable(lines: Iterable[bytes]) -> str:
    """Return lines of a process's output as printable text."""
    texts = (line.decode("utf-8", "backslashreplace") for line in lines)
    return "\n".join("".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text) for text in texts)


def write_stderr(data: bytes) -> None:
    """Write to this process's inherited stderr, as its workers would, even if `sys.stderr` is something else.

    If nobody reads it for `_UNREAD_S`, the rest is dropped, so that the thread can continue. If this process started
    without a stderr, all of it is dropped: descriptor 2 may be closed, or be something else.
    """
    if sys.__stderr__ is None:
        return
    view = memoryview(data)
    with suppress(OSError):  # closed, or nobody reads it
        while view and (sys.platform == "win32" or select.select([], [2], [], _UNREAD_S)[1]):
            view = view[os.write(2, view[:_PIPE_BUF]) :]
