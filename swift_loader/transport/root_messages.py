"""The messages between the trainer and a root. Forked templates and their exits are as a template's workers."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from swift_loader.transport.bodies import FixedBody, PickledBody
from swift_loader.transport.frames import Kind


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
