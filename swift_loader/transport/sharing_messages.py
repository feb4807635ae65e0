"""The messages of ranks that share a template, of its keeper, and of the template. Pure: no I/O, no clock.

A keeper answers a rank that connects as a root does: `Forked` names the template, `Exited` its end, and `Refused` says
why each rank needs a template of its own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_loader.transport.bodies import FixedBody, PickledBody
from swift_loader.transport.frames import Kind

if TYPE_CHECKING:
    from swift_loader.sampling.plan import PlanSettings
    from swift_loader.transport.payload import PayloadLayout

__all__ = ["Join", "Member"]


@dataclass(slots=True)
class Join(FixedBody):
    """Makes a rank a member. From the rank to the keeper, which sends another one to the template.

    Attached by the rank: the template's end of its channel, and its ends for stacks, stderr and stdout. Attached by the
    keeper: the channel, the one for stacks, the one for stdout, and a pidfd of the rank.
    """

    KIND = Kind.JOIN
    LAYOUT = struct.Struct("")


@dataclass(slots=True)
class Member(PickledBody):
    """The first message of a member to the template. The answer is `Built`.

    Attached is the payload. All members have the same; the template builds the dataset of the first one.
    """

    KIND = Kind.MEMBER

    layout: PayloadLayout
    plan: PlanSettings
    """What its workers begin with."""
    pid: int
    variables: dict[str, str]
    """The environment variables that differ from rank to rank."""
    cores: frozenset[int]
    """Those that it may use."""
