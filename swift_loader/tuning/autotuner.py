"""Lets a tuner choose the workers of a running loader.

The loop's thread calls `is_due` between two batches, and then `decide`. Most calls only read the clock.

    WARMING ──the new workers are at work──► MEASURING ──a window is full──► the tuner decides ──► either of them
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from enum import Enum

import numpy as np

from swift_loader.metrics.machine import available_memory
from swift_loader.metrics.observations import Observations, Setup
from swift_loader.tuning.tuner import Machine, Tuner, TunerState, most_workers, window_of

CHECK_NS = 250_000_000
"""How often it looks."""

WINDOW_S = 3.0
"""A window is at least so long: shorter ones are too noisy for gains of 2 %."""

MIN_BATCHES = 8
MAX_BATCHES = 4096
BATCHES_PER_WORKER = 2
"""A window has at least so many batches: each worker has then built some."""

TYPICAL_STEP_S = 0.05
"""Of a loop, for the first number."""


class _Phase(Enum):
    """See the drawing above."""

    WARMING = "warming"
    MEASURING = "measuring"


@dataclass(slots=True)
class _Mark:
    """What had been measured at some point."""

    now_ns: int
    num_delivered: int
    elapsed_s: float
    trainer_cpu_s: float


class Autotuner:
    """Chooses the number of workers of one loader, while its loop runs. The loop's thread uses it."""

    def __init__(self, num_workers: int) -> None:
        """Begin with the workers that there are."""
        self._tuner = Tuner()
        self._phase = _Phase.WARMING
        self._mark = _Mark(time.perf_counter_ns(), 0, 0.0, 0.0)
        """Where the phase began."""
        self._next_ns = self._mark.now_ns + CHECK_NS
        self._wanted = num_workers
        self.history: list[str] = []
        """What it changed and why, oldest first."""

    def describe(self) -> list[str]:
        """Return what it changed and what it thinks now, one line each."""
        is_tried = self.history and self._tuner.state is TunerState.SEARCHING
        reason = "it is being tried" if is_tried else self._tuner.reason
        return [*self.history, f"now {self._wanted}: {reason}"]

    def is_due(self) -> bool:
        """Return whether to call `decide`. Mostly this only reads the clock."""
        now_ns = time.perf_counter_ns()
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + CHECK_NS
        return True

    def decide(self, observations: Observations) -> int | None:
        """Return another number of workers, if enough was measured to know a better one.

        `observations`: what was measured until now, with the last `MAX_BATCHES` batches.
        """
        mark, wanted = self._mark, self._wanted
        num_new = observations.num_delivered - mark.num_delivered
        if self._phase is _Phase.WARMING:
            # Until then, the loop gets batches that were built by the workers before.
            if observations.setup.num_workers == wanted and num_new >= observations.setup.max_in_flight:
                self._begin(_Phase.MEASURING, observations)
            return None
        is_short = observations.elapsed_s - mark.elapsed_s < WINDOW_S
        if is_short or num_new < max(MIN_BATCHES, BATCHES_PER_WORKER * wanted):
            return None
        batches = observations.batches[observations.batches["asked_ns"] >= mark.now_ns]
        window = window_of(batches, wanted, (observations.trainer_cpu_s - mark.trainer_cpu_s) / num_new)
        if window is None:
            return None
        machine = room_for(observations)
        self._wanted = min(self._tuner.decide(window, machine), machine.max_workers)
        if self._wanted == wanted:
            self._begin(_Phase.MEASURING, observations)
            return None
        after = f"after {observations.elapsed_s:.0f} s"
        self.history.append(f"{after}, {wanted} → {self._wanted}: {self._tuner.reason}")
        self._begin(_Phase.WARMING, observations)
        return self._wanted

    def _begin(self, phase: _Phase, observations: Observations) -> None:
        self._phase = phase
        delivered, elapsed_s = observations.num_delivered, observations.elapsed_s
        self._mark = _Mark(time.perf_counter_ns(), delivered, elapsed_s, observations.trainer_cpu_s)


def room_for(observations: Observations, *, keeps_limit: bool = True) -> Machine:
    """Return what the workers of a rank may use. The ranks of a machine share it evenly.

    With `keeps_limit`, a limit of batches in flight that the user gave stays: more workers than that can't be busy.
    """
    setup, nbytes = observations.setup, observations.batches["nbytes"]
    free_nbytes = (available_memory() or sys.maxsize) // max(1, setup.world_size_here)
    batch_nbytes = int(np.median(nbytes)) if nbytes.size else 0
    most = most_workers(setup.cores_per_rank, free_nbytes, batch_nbytes, setup.num_workers)
    return Machine(setup.cores_per_rank, min(most, _most_busy(setup)) if keeps_limit else most)


def first_number(setup: Setup, build_s: float) -> int:
    """Return how many workers to start with. `build_s`: how long a worker took for a batch; infinite if unknown."""
    most = max(1, int(setup.cores_per_rank))
    guess = most if math.isinf(build_s) else min(most, max(1, math.ceil(build_s / TYPICAL_STEP_S)))
    return max(setup.num_workers, min(guess, _most_busy(setup)))


def _most_busy(setup: Setup) -> int:
    return sys.maxsize if setup.is_in_flight_chosen else setup.max_in_flight
