"""What the tuner looks at: the means of some seconds with one number of workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Machine", "Window"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the workers of this rank may use."""

    num_cores: float
    """Cores for the trainer and its workers."""
    max_workers: int
    """No more workers than that: memory, and the user's limit."""


@dataclass(frozen=True, slots=True)
class Window:
    """The means of a window of time. Times are per batch."""

    num_workers: int
    seconds: float
    """Length of the window, without the time between two passes."""
    num_batches: int
    """Batches that the loop got in it."""
    waited_s: float
    """How long the loop waited for a batch."""
    step_s: float
    """The loop's own time: from one batch to when it asks for the next."""
    service_s: float
    """How long a worker takes for a batch, without waiting for a core."""
    cpu_s: float
    """How much of that a core is busy."""
    trainer_cpu_s: float
    """How long the trainer keeps cores busy per batch."""

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.num_batches / self.seconds

    @property
    def wait_share(self) -> float:
        """Which share of the loop's time is waiting."""
        return self.waited_s / (self.waited_s + self.step_s)

    def expected_rate(self, num_workers: int, num_cores: float) -> float:
        """Return the most batches per second that so many workers may bring.

        It is the least of three limits: the loop's, the workers', and that of the cores.
        """
        by_cores = num_cores / max(self.cpu_s + self.trainer_cpu_s, 1e-9)
        return min(1 / max(self.step_s, 1e-9), num_workers / max(self.service_s, 1e-9), by_cores)

    def needed_workers(self, machine: Machine) -> int:
        """Return the fewest workers that bring nearly the highest rate that the machine allows."""
        best = self.expected_rate(machine.max_workers, machine.num_cores)
        return next(
            number
            for number in range(1, machine.max_workers + 1)
            if self.expected_rate(number, machine.num_cores) >= NEARLY * best
        )


NEARLY = 0.99
