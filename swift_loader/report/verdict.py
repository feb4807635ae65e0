"""Says whether the loop waits for data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from swift_loader.metrics.observations import Observations
from swift_loader.report.life import Life, steady

__all__ = ["MIN_BATCHES", "Bound", "Verdict"]

MIN_BATCHES = 16
"""With fewer batches, there is no verdict."""

DATA_BOUND = 0.10
MODEL_BOUND = 0.03
"""Shares of the time that the loop waits: at least, and at most."""


class Bound(str, Enum):
    """What limits the speed of the loop."""

    STARTING = "starting"
    """Too few batches to say."""
    MODEL = "model-bound"
    """The loop hardly ever waits. Faster data would bring nothing."""
    BALANCED = "balanced"
    """The loop waits now and then."""
    DATA = "data-bound"
    """The loop waits for data for more than a tenth of the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the loop waits for data, and how much."""

    bound: Bound
    wait_share: float
    """Share of the loop's time in which it waited for a batch, from 0 to 1."""

    @classmethod
    def of(cls, observations: Observations) -> Verdict:
        """Return the verdict on the last batches. The time between two epochs doesn't count, nor does the start."""
        kept = steady(observations)
        if len(kept.batches) < MIN_BATCHES:
            return cls(Bound.STARTING, _share_of_run(observations))
        share = wait_share(Life.of(kept))
        if share >= DATA_BOUND:
            return cls(Bound.DATA, share)
        return cls(Bound.MODEL if share <= MODEL_BOUND else Bound.BALANCED, share)


def wait_share(life: Life) -> float:
    """Return the share of the time in which the loop waited. The first batch doesn't count."""
    waited, worked = float(life.waited[1:].sum()), float(np.nansum(life.step))
    return waited / (waited + worked) if waited + worked > 0 else 0.0


def _share_of_run(observations: Observations) -> float:
    return min(1.0, observations.waited_s / observations.elapsed_s) if observations.elapsed_s > 0 else 0.0
