"""The tasks of one worker. It does them in order, so it is building the first of them. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

Task = tuple[int, int]
"""(generation, sequence)."""

Load = tuple[int, int, int, int]
"""(tasks, READY batches, worker id, serial number). Of several workers, the one with the least gets the next task."""

MAX_TASKS = 64
"""Far fewer messages than a pipe holds, so sending a task never blocks."""


@dataclass(slots=True)
class Queue:
    """The tasks of a worker."""

    serial: int
    worker_id: int
    max_tasks: int
    """How many tasks of the current generation it should have. Depends on `build_s`."""
    tasks: deque[Task] = field(default_factory=deque)
    """Tasks that were sent and aren't answered, in the order sent."""
    num_current: int = 0
    """How many of these tasks belong to the current generation."""
    num_ready: int = 0
    build_s: float = math.inf
    """Smoothed time to build a batch. Infinite until the first one is known."""
    deviation_s: float = 0.0
    """Smoothed absolute difference from `build_s`."""
    entry: Load | None = None
    """Belongs to `Room`: under which load it finds the worker. None: not at all."""

    @property
    def load(self) -> Load:
        """How much the worker has to do."""
        return len(self.tasks), self.num_ready, self.worker_id, self.serial

    def note_build(self, build_s: float) -> None:
        """Record how long a batch took."""
        if math.isinf(self.build_s):
            self.build_s = build_s
        else:
            self.deviation_s += 0.2 * (abs(build_s - self.build_s) - self.deviation_s)
            self.build_s += 0.2 * (build_s - self.build_s)
