"""The messages between the trainer and a template. Pure: no I/O, no clock."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from swift_loader.transport.messages import BuildReport, FixedBody, Kind, PickledBody

# The messages between the trainer and a root. Forked templates and their exits are as a template's workers.


@dataclass(slots=True)
class Blank(PickledBody):
    """Asks to import modules and to fork a template. Without a channel attached, it asks for the imports only."""

    KIND = Kind.BLANK

    serial: int
    """The number of the request."""
    modules: tuple[str, ...]


@dataclass(slots=True)
class Warmed(FixedBody):
    """The modules of a request without a channel are imported."""

    KIND = Kind.WARMED
    LAYOUT = struct.Struct("<I")

    serial: int


@dataclass(slots=True)
class Refused(PickledBody):
    """Says why there is no fork. The root forks no more."""

    KIND = Kind.REFUSED

    serial: int
    is_stale: bool
    """Whether only the source of a module has changed since its import, so that another root can do it."""
    reason: str


@dataclass(slots=True)
class Built(PickledBody):
    """The template has built the dataset. Says whether workers share it or each builds its own."""

    KIND = Kind.BUILT

    report: BuildReport
    forkable: bool
    """False: each worker needs its own interpreter."""
    reason: str
    """Why the dataset isn't shared, or why the template can't be forked; for the log. Empty if it is shared."""


@dataclass(slots=True)
class Fork(FixedBody):
    """Asks for a worker; its channel is attached."""

    KIND = Kind.FORK
    LAYOUT = struct.Struct("<I?")

    worker: int
    in_place: bool
    """True: the receiver becomes the worker instead of forking one."""


@dataclass(slots=True)
class Forked(FixedBody):
    """A worker was forked; its pidfd is attached."""

    KIND = Kind.FORKED
    LAYOUT = struct.Struct("<II")

    worker: int
    pid: int


@dataclass(slots=True)
class Exited(FixedBody):
    """A forked worker is gone and reaped."""

    KIND = Kind.EXITED
    LAYOUT = struct.Struct("<Ii")

    worker: int
    exit_code: int
    """As `os.waitstatus_to_exitcode` returns it: negative for a signal."""
