"""The messages between the trainer and the processes of a pool, which serve several loaders."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_loader.transport.bodies import FixedBody, PickledBody
from swift_loader.transport.frames import Kind

if TYPE_CHECKING:
    from swift_loader.sampling.plan import PlanSettings
    from swift_loader.transport.payload import Environment, PayloadLayout

__all__ = ["LAST", "NO_SEAT", "SERVED", "Page", "Pool", "Seat", "Share", "Unshare"]

NO_SEAT = 0
"""In a worker's page: it works for nobody. Seats are numbered from 1."""

SERVED = 0
"""Index of the page's word that says for which seat the worker works."""

LAST = 1
"""Index of the word that says for which seat it began a task last."""


@dataclass(slots=True)
class Pool(PickledBody):
    """Makes a template that of a pool."""

    KIND = Kind.POOL

    environment: Environment


@dataclass(slots=True)
class Share(PickledBody):
    """Asks the template to build a dataset, whose payload is attached. The answer is `Built`."""

    KIND = Kind.SHARE

    key: int
    layout: PayloadLayout


@dataclass(slots=True)
class Unshare(FixedBody):
    """Asks the template to drop a dataset."""

    KIND = Kind.UNSHARE
    LAYOUT = struct.Struct("<Q")

    key: int


@dataclass(slots=True)
class Page(FixedBody):
    """The first message to a worker. Attached is a page, in which it shows which seat it works for."""

    KIND = Kind.PAGE
    LAYOUT = struct.Struct("")


@dataclass(slots=True)
class Seat(PickledBody):
    """Asks a worker to serve one more loader.

    Attached are the seat's channel, the payload, and the end of a pipe that the worker closes when it leaves the seat.
    """

    KIND = Kind.SEAT

    number: int
    key: int
    """Of the dataset. If the template has built it, the worker uses that."""
    layout: PayloadLayout
    plan: PlanSettings
    """What the worker begins with."""
