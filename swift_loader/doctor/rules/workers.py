"""How many workers keep a training step fed. Pure.

w workers build w / batch_s batches per second, but never more than the cores can: num_cores / (batch_s * cpu_share).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WorkersNeeded", "workers_needed"]

_RESERVE = 1.1
"""So that an uneven batch doesn't make the step wait."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class WorkersNeeded:
    """The workers for a step, on this machine."""

    num_workers: int
    """If the step can't be fed: the number beyond which more workers bring nothing."""
    num_cores: float
    step_s: float
    fed_step_s: float
    """The shortest step that so many workers keep fed, in seconds."""

    @property
    def is_fed(self) -> bool:
        """Whether the step needn't wait."""
        return self.fed_step_s <= self.step_s


def workers_needed(batch_s: float, cpu_share: float, step_s: float, num_cores: float) -> WorkersNeeded:
    """Return how many workers keep a step fed.

    Args:
        batch_s: Mean time to build a batch in one worker, in seconds.
        cpu_share: Share of that time in which the worker uses a core, 0 to 1.
        step_s: Duration of a training step in seconds.
        num_cores: Cores that the workers may use; a fraction if a cgroup limits them.
    """
    shortest_s = batch_s * cpu_share / num_cores
    """What the cores can do at best."""
    wanted = max(1, math.ceil(_RESERVE * batch_s / step_s - _ROUNDING))
    are_cores_enough = wanted * shortest_s <= batch_s
    num_workers = wanted if are_cores_enough else max(1, math.ceil(batch_s / shortest_s))
    return WorkersNeeded(num_workers, num_cores, step_s, max(batch_s / num_workers, shortest_s))
