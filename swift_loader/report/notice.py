"""The line at the end of an epoch in which the loop waited. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from swift_loader.metrics.observations import Observations
from swift_loader.report.advice import SWIFT_LOADER, advise
from swift_loader.report.verdict import DATA_BOUND, MIN_BATCHES, Bound, Verdict

__all__ = ["EpochNotices"]

_MIN_ELAPSED_S = 60.0
"""The first look is after a minute. After each line, the next look is after twice the time."""

_VERDICT_EVERY_S = 1.0
"""A verdict takes a millisecond."""


@dataclass(slots=True)
class EpochNotices:
    """Says after an epoch what would help. Says nothing twice. Used by the loop's thread alone."""

    option: str = SWIFT_LOADER
    next_at_s: float = _MIN_ELAPSED_S
    """How long the loop must have run for the next look."""
    last_action: str = ""

    def is_due(self, elapsed_s: float) -> bool:
        """Return whether the loop has run long enough for another look. O(1)."""
        return elapsed_s >= self.next_at_s

    def note(self, observations: Observations) -> str:
        """Return the line for the last epoch, which is over. Empty: there is nothing to say, or nothing new."""
        if not self.is_due(observations.elapsed_s) or not len(observations.batches):
            return ""
        epoch = int(observations.batches["epoch"][-1])
        self.next_at_s = observations.elapsed_s + _VERDICT_EVERY_S
        of_epoch = _last_pass(observations)
        verdict = Verdict.of(of_epoch)
        if verdict.bound is not Bound.DATA or verdict.wait_share < DATA_BOUND:
            return ""
        self.next_at_s = 2 * observations.elapsed_s
        advices = advise(of_epoch, self.option)
        if not advices or advices[0].action == self.last_action:
            return ""
        self.last_action = advices[0].action
        waited = f"the loop waited {100 * verdict.wait_share:.0f} % of epoch {epoch} for data"
        return f"{waited}: {advices[0]}"


def _last_pass(observations: Observations) -> Observations:
    """Return the observations of the last pass, or all of them if it has too few batches."""
    batches = observations.batches
    mask = (batches["epoch"] == batches["epoch"][-1]) & (batches["pass_number"] == batches["pass_number"][-1])
    if int(np.count_nonzero(mask)) < 2 * MIN_BATCHES:
        return observations
    return replace(observations, batches=observations.batches[mask])
