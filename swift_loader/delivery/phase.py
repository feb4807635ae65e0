"""What the loop's thread is doing, so that an exception of a signal handler loses no batch. Pure."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What an exception of a signal handler would interrupt on the loop's thread."""

    IDLE = "idle"
    """Nothing: no call is under way, and the last one left nothing undone."""
    WAITING = "waiting"
    """Something that the next call repeats. There may be actions that it must carry out first."""
    TAKING = "taking a batch"
    """Something that can't be repeated."""
    BROKEN = "broken"
    """Nothing: an exception has interrupted the taking of a batch, so even batches that are ready aren't delivered."""
