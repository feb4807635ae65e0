"""The loader's own exceptions, and how text for people is written.

Wrong arguments raise plain `ValueError` and `TypeError`. An exception of the user's code keeps its type if it survives
a pickle round trip; otherwise it becomes a `WorkerError`. Either way its `__cause__` is a `RemoteTraceback`. A note
says where it was raised.

What torch's DataLoader tells of a worker is a RuntimeError, so these are, too.
"""

from __future__ import annotations

import inspect
import math
import warnings
from contextlib import suppress
from pickle import PicklingError
from typing import Any, TypeVar

_PACKAGE = __file__.removesuffix("errors.py")

_THREE_DIGITS = 999.5
"""From here on, three digits show the next unit."""


class SwiftLoaderError(Exception):
    """Base class of the loader's own errors."""


class WorkerError(SwiftLoaderError, RuntimeError):
    """The user's code raised in a worker, and the exception can't be pickled or rebuilt in the trainer."""


class EncodeError(WorkerError, TypeError, PicklingError):
    """Something can't be sent to another process: an object in a batch, the dataset or a function.

    The message names its path and type. Torch raises one of the other types here: a `RuntimeError`, too.
    """

    def __init__(self, fact: str, hint: str = "") -> None:
        """Make a message of what is wrong and what to do."""
        super().__init__(f"{fact}. {hint}" if hint else fact)
        self.hint = hint

    @property
    def fact(self) -> str:
        """The message without what to do."""
        return str(self).removesuffix(f". {self.hint}")


class WorkerDied(SwiftLoaderError, RuntimeError):
    """A worker or the template process died and isn't replaced.

    Either `worker_restarts` is used up, or the batch has ended two workers. The message names worker, exit code or
    signal, and batch.
    """


class ForkHangs(WorkerDied):
    """A fork of the program waits for a lock that one of the program's threads held when it was forked.

    `DataLoader` goes on with fresh interpreters instead, unless the dataset can't be sent to them.
    """


class NoProcessesLeft(WorkerDied, OSError):
    """The system starts no more threads or processes for this user. The message names the limits."""


class WorkerStalled(SwiftLoaderError, RuntimeError, TimeoutError):
    """A worker spent more than `timeout` seconds on one batch, or no worker was there to build it for that long."""


class RankDied(SwiftLoaderError, RuntimeError):
    """A rank that shares batches with this one has ended, or has closed its loader."""


class RankMismatch(SwiftLoaderError, RuntimeError):
    """Ranks that must be at the same batch are not. The message names two ranks, and where each of them is."""


class RankStalled(SwiftLoaderError, RuntimeError, TimeoutError):
    """A rank waited more than `timeout` seconds for the ranks that it shares batches with."""


class SharedMemoryFull(SwiftLoaderError, OSError):
    """There isn't enough shared memory for a batch. The message names the bytes needed and the limit."""


class SharedMemoryLost(SwiftLoaderError, OSError):
    """Shared memory of another process can't be opened: it has ended, or is on another machine."""


class CacheMismatch(SwiftLoaderError, ValueError):
    """A cache can't have this dataset's samples: a file has others, or they draw random numbers."""


class SamplesDraw(CacheMismatch):
    """What `cached` keeps, or what `mapped` reads, draws random numbers. Move that to `transform`."""


class CacheCorrupt(SwiftLoaderError):
    """The file of a cache is damaged where nothing can be made again: its header, or where its entries end."""


class NoDescriptorsLeft(SwiftLoaderError, OSError):
    """The process or the system has run out of file descriptors. The message names the limit."""


class DatasetMismatch(SwiftLoaderError):
    """Two processes of the loader built different datasets, or its length has changed. The message says how."""


class StateMismatch(SwiftLoaderError, ValueError):
    """This loader can't resume from a state. The message names the field and what is wrong with it."""


class LoaderClosed(SwiftLoaderError):
    """The loader was used after `close()`."""


OF_ALL_SAMPLES = (CacheMismatch, CacheCorrupt, LoaderClosed)
"""Errors that a sample raises and that aren't its own, so leaving it out is no remedy."""


class TooManyErrors(SwiftLoaderError):
    """More samples failed than `max_errors` allows, or all samples of a batch. `__cause__` is the last one's error."""


class ProtocolError(SwiftLoaderError):
    """A process of the loader sent a message that is malformed, or that can't follow what it sent before.

    This is a bug in swift_loader, or something else wrote to its pipe.
    """


class SwiftLoaderWarning(UserWarning):
    """A problem that doesn't stop the loop, such as a worker that was replaced."""


class RemoteTraceback(Exception):
    """The traceback in another process, as text. Its first line names the process and the batch."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


_Raised = TypeVar("_Raised", bound=BaseException)


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set the cause of an exception of the user's code, whose class may refuse attributes."""
    BaseException.__dict__["__cause__"].__set__(error, cause)


def noted(error: _Raised, place: str) -> _Raised:
    """Return an exception of the user's code with a note of its place, from Python 3.11 on. Our own errors say it.

    The place up to its first comma says whose it is: a note about another batch or item of the same is replaced.
    """
    raised: Any = error
    note = f"swift_loader: {place}"
    whose = note.partition(",")[0]
    if hasattr(raised, "add_note") and not isinstance(error, SwiftLoaderError):
        with suppress(Exception):  # a class may refuse attributes
            notes = getattr(raised, "__notes__", [])
            raised.__notes__ = [*(one for one in notes if one.partition(",")[0] != whose), note]
    return error


def warn(text: str) -> None:
    """Issue a `SwiftLoaderWarning` at the nearest line outside this package. Call it on the loop's thread."""
    level, frame = 1, inspect.currentframe()  # `warnings` can't skip files before Python 3.12
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(text), SwiftLoaderWarning, stacklevel=level)


def printable(text: str) -> str:
    """Return a text without control characters, which file names and exceptions may hold and terminals obey."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def counted(number: int, noun: str) -> str:
    """Return a number and the noun in its plural: `1,563 batches`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 's')) else 's'}"


def nbytes_text(nbytes: float) -> str:
    """Return a size with its unit: `512 B`, `1.5 MiB`."""
    power = min(4, int(math.log2(max(1, nbytes)) // 10))
    return f"{nbytes / 1024**power:.4g} {'KMGT'[power - 1]}iB" if power else f"{round(nbytes)} B"


def time_text(seconds: float) -> str:
    """Return a duration in three digits and a unit: `1.2 s`, `3.4 ms`, `12 us`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < _THREE_DIGITS:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < _THREE_DIGITS else f"{seconds:.0f} s"
