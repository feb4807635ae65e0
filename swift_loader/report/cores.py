"""Cores that jobs share equally, in virtual time. Pure."""

from __future__ import annotations

from heapq import heappop, heappush

__all__ = ["Cores"]


class Cores:
    """Processor sharing: n jobs on k cores run at min(1, k / n) of full speed each, if no other program interferes.

    Virtual time counts the CPU time that each job has had since the beginning. A job ends when virtual time reaches its
    own end, so a new job changes no other one's entry.
    """

    __slots__ = ("_interference", "_jobs", "_num_cores", "_rate", "_slowdown", "_time", "_virtual")

    def __init__(self, num_cores: float, interference: float = 1.0, slowdown: float = 0.0) -> None:
        """Make idle cores.

        Args:
            num_cores: How many, at least 1. May be a fraction.
            interference: By how much a job alone takes longer because of other programs, at least 1.
            slowdown: By how much a job takes longer for each other one that runs at the same time.
        """
        self._num_cores = num_cores
        self._interference = interference
        self._slowdown = slowdown
        self._jobs: list[tuple[float, int]] = []
        self._time = 0.0
        self._virtual = 0.0
        self._rate = 1.0

    def add(self, now: float, job: int, seconds: float) -> None:
        """Begin a job that needs so much CPU time. `now` never goes back."""
        self._advance(now)
        heappush(self._jobs, (self._virtual + seconds, job))
        self._set_rate()

    def next_end(self) -> float:
        """Return when the next job ends, if none is added before. Infinite if there is none."""
        if not self._jobs:
            return float("inf")
        return self._time + max(0.0, self._jobs[0][0] - self._virtual) / self._rate

    def pop(self, now: float) -> int:
        """Return the job that ends now, which must be `next_end()`."""
        self._advance(now)
        end, job = heappop(self._jobs)
        self._virtual = max(self._virtual, end)
        self._set_rate()
        return job

    def _advance(self, now: float) -> None:
        if self._jobs:
            self._virtual += (now - self._time) * self._rate
        self._time = now

    def _set_rate(self) -> None:
        num_jobs = len(self._jobs)
        # A job alone can go to the core that other programs need least; many jobs can't. So the cores lose more.
        share = min(1.0, self._num_cores / (self._interference * max(1, num_jobs))) / self._interference
        self._rate = share / (1 + self._slowdown * max(0.0, min(num_jobs, self._num_cores) - 1))
