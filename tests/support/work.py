"""Work for tests of what hands it out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from swift_loader.scheduler.work import PlannedSource


def planned(epoch: int, step: int, num_batches: Callable[[int], int], last_irregular_epoch: int = -1) -> PlannedSource:
    """Return the batches of a plan of which only the lengths of epochs are known, from a position on."""
    plan: Any = SimpleNamespace(
        num_batches=num_batches,
        last_irregular_epoch=last_irregular_epoch,
    )
    return PlannedSource(plan, epoch, step)
