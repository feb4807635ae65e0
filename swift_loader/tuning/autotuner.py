"""Lets a tuner choose the workers of a running loader.

The loop's thread calls `check` between two batches. Most calls only read the clock.

    WARMING ──the new workers are at work──► MEASURING ──a window is full──► the tuner decides ──► either of them
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from swift_loader.metrics.observations import Observations
from swift_loader.tuning.tuner import Tuner, TunerState
from swift_loader.tuning.window import Machine
from swift_loader.tuning.windows import batches_since, window_of

__all__ = ["Autotuner", "Resize"]

CHECK_NS = 250_000_000
"""How often it looks."""

WINDOW_S = 3.0
"""A window is at least so long: shorter ones are too noisy for gains of 2 %."""

MIN_BATCHES = 8
MAX_BATCHES = 4096
BATCHES_PER_WORKER = 2
"""A window has at least so many batches: each worker has then built some."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of the number of workers."""

    at_s: float
    """When, in seconds of training since the loader started."""
    before: int
    after: int
    reason: str


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

    def __init__(
        self,
        num_workers: int,
        find_machine: Callable[[Observations], Machine],
        observe: Callable[[int], Observations],
        resize: Callable[[int], None],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Begin with the workers that there are.

        Args:
            num_workers: How many workers the loader starts with.
            find_machine: Returns what the workers may use.
            observe: Returns what was measured until now, with at most so many of the last batches.
            resize: Changes the number of workers.
            clock_ns: The clock of the observations.
        """
        self._find_machine = find_machine
        self._observe = observe
        self._resize = resize
        self._clock_ns = clock_ns
        self._tuner: Tuner | None = None
        """None until there is something measured."""
        self._phase = _Phase.WARMING
        self._next_ns = clock_ns() + CHECK_NS
        self._mark = _Mark(clock_ns(), 0, 0.0, 0.0)
        """Where the phase began."""
        self._wanted = num_workers
        self.history: list[Resize] = []
        """What it changed, oldest first."""

    @property
    def reason(self) -> str:
        """Why the loader has its workers, as half a sentence."""
        return "nothing was measured yet" if self._tuner is None else self._tuner.reason

    def describe(self) -> list[str]:
        """Return what it changed and what it thinks now, one line each."""
        changes = [
            f"after {change.at_s:.0f} s, {change.before} → {change.after}: {change.reason}" for change in self.history
        ]
        is_trying = self.history and self._tuner is not None and self._tuner.state is TunerState.SEARCHING
        return [*changes, f"now {self._wanted}: {'it is being tried' if is_trying else self.reason}"]

    def check(self) -> None:
        """Change the number of workers, if enough was measured to know a better one."""
        now_ns = self._clock_ns()
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + CHECK_NS
        observations = self._observe(1)
        if self._phase is _Phase.WARMING:
            num_new = observations.num_delivered - self._mark.num_delivered
            # Until then, the loop gets batches that were built by the workers before.
            if observations.setup.num_workers == self._wanted and num_new >= observations.setup.max_in_flight:
                self._begin(_Phase.MEASURING, observations, now_ns)
            return
        if observations.elapsed_s - self._mark.elapsed_s >= WINDOW_S:
            self._take_window(now_ns)

    def _take_window(self, now_ns: int) -> None:
        """Let the tuner decide, if the window has enough batches."""
        observations = self._observe(MAX_BATCHES)
        num_new = observations.num_delivered - self._mark.num_delivered
        if num_new < max(MIN_BATCHES, BATCHES_PER_WORKER * self._wanted):
            return
        trainer_cpu_s = (observations.trainer_cpu_s - self._mark.trainer_cpu_s) / num_new
        window = window_of(batches_since(observations, self._mark.now_ns), self._wanted, trainer_cpu_s)
        if window is None:
            return
        machine = self._find_machine(observations)
        if self._tuner is None:
            self._tuner = Tuner(machine)
        self._tuner.machine = machine
        wanted = min(self._tuner.decide(window), machine.max_workers)
        if wanted == self._wanted:
            self._begin(_Phase.MEASURING, observations, now_ns)
            return
        self.history.append(Resize(observations.elapsed_s, self._wanted, wanted, self._tuner.reason))
        self._wanted = wanted
        self._resize(wanted)
        self._begin(_Phase.WARMING, observations, now_ns)

    def _begin(self, phase: _Phase, observations: Observations, now_ns: int) -> None:
        self._phase = phase
        self._mark = _Mark(now_ns, observations.num_delivered, observations.elapsed_s, observations.trainer_cpu_s)

    def __repr__(self) -> str:
        return f"<Autotuner {self._phase.value}, {self._wanted} workers: {self.reason}>"
