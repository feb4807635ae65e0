"""Remembers which plan a loader had when, so that a batch of the past can be named. Pure."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.plan import Plan

__all__ = ["PastPlans"]

MAX_PLANS = 64
"""So many are remembered. A plan changes when a state is loaded or a batch is skipped, not with each epoch."""


class PastPlans:
    """The last plans of one loader. One thread adds them; any thread may ask."""

    def __init__(self) -> None:
        self._plans: deque[tuple[int, Plan]] = deque(maxlen=MAX_PLANS)
        """Each with the time from which it was used."""

    def note(self, now_ns: int, plan: Plan) -> None:
        """Record that a plan is used from now on."""
        if not self._plans or self._plans[-1][1] != plan:
            self._plans.append((now_ns, plan))

    def indices_of(self, epoch: int, step: int, delivered_ns: int) -> NDArray[np.int64]:
        """Return the dataset indices of a batch that was delivered at this time.

        Returns:
            `(n,)` indices; none if the plan of that time isn't remembered.
        """
        plan = next((plan for since_ns, plan in reversed(tuple(self._plans)) if since_ns <= delivered_ns), None)
        if plan is None or step >= plan.num_batches(epoch):
            return np.empty(0, np.int64)
        return plan.batch(epoch, step).indices

    def __repr__(self) -> str:
        return f"<PastPlans: {len(self._plans)}>"
