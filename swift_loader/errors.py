"""Everything the loader raises on its own account.

Wrong arguments are plain `ValueError` and `TypeError`. An exception of the user's own code keeps its type where that
type survives a pickle round trip, and is a `WorkerError` otherwise; both carry a `RemoteTraceback` as `__cause__`.
"""

from __future__ import annotations

__all__ = [
    "DatasetMismatch",
    "EncodeError",
    "LoaderClosed",
    "NoDescriptorsLeft",
    "ProtocolError",
    "RemoteTraceback",
    "SharedMemoryFull",
    "StateMismatch",
    "SwiftLoaderError",
    "SwiftLoaderWarning",
    "TooManyErrors",
    "WorkerDied",
    "WorkerError",
    "WorkerStalled",
]


class SwiftLoaderError(Exception):
    """Base of the loader's own errors."""


class WorkerError(SwiftLoaderError):
    """The user's code raised in a worker, and its exception can't be rebuilt here."""


class EncodeError(WorkerError, TypeError):
    """A batch holds something that can't be sent to the trainer; the message names the path and the type."""


class WorkerDied(SwiftLoaderError):
    """A worker, or the template process that starts them, ended without being told to, and isn't replaced any more."""


class WorkerStalled(SwiftLoaderError, TimeoutError):
    """A worker was at one batch for longer than `timeout` seconds, or no worker had the batch for so long."""


class SharedMemoryFull(SwiftLoaderError, OSError):
    """The memory for a batch can't be had; the message names the need and the limit."""


class NoDescriptorsLeft(SwiftLoaderError, OSError):
    """The process, or the system, has run out of file descriptors; the message names the limit."""


class DatasetMismatch(SwiftLoaderError):
    """A process of the loader has built another dataset than the first one; the message names what differs."""


class StateMismatch(SwiftLoaderError, ValueError):
    """A state can't be continued by this loader; the message names the field and what is wrong with it."""


class LoaderClosed(SwiftLoaderError):
    """The loader was used after `close()`."""


class TooManyErrors(SwiftLoaderError):
    """More samples failed than `max_errors` allows, or all of a batch; `__cause__` is what the last one raised."""


class ProtocolError(SwiftLoaderError):
    """A message between the processes failed its checks: magic, kind, length or checksum."""


class SwiftLoaderWarning(UserWarning):
    """Something the user should know of, although the loop goes on."""


class RemoteTraceback(Exception):
    """The traceback of another process, as text, with who and where on top."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
