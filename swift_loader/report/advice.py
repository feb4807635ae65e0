"""Advice: the number of workers that the tuner's closed form gives, and what it may bring."""

from __future__ import annotations

from dataclasses import dataclass

from swift_loader.metrics.observations import Observations
from swift_loader.report.life import steady
from swift_loader.report.verdict import Bound, Verdict
from swift_loader.tuning.autotuner import room_for
from swift_loader.tuning.tuner import window_of

__all__ = ["DATALOADER", "SWIFT_LOADER", "Advice", "advise"]

SWIFT_LOADER = "worker_per_consumer"
DATALOADER = "num_workers"
"""What a loader's class calls its number of workers."""

_MIN_GAIN = 0.05
"""A smaller gain isn't worth a change."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change."""

    action: str
    """Such as `worker_per_consumer=6`."""
    gain: float
    """How much faster the loop may get: 0.45 is 45 %. Less where workers compete for what the machine shares, such as
    memory bandwidth or a disk, or where build times vary so much that batches wait for their turn."""

    def __str__(self) -> str:
        return f"{self.action} would bring up to {100 * self.gain:+.0f} %"


def advise(observations: Observations, option: str = SWIFT_LOADER) -> tuple[Advice, ...]:
    """Return what would make the loop faster. Empty if it hardly waits, or if more workers bring less than 5 %."""
    setup = observations.setup
    if Verdict.of(observations).bound not in (Bound.DATA, Bound.BALANCED):
        return ()
    if setup.loading_rank is not None or setup.num_remote:  # the cores that build aren't those of this rank
        return ()
    batches = steady(observations).batches
    trainer_cpu_s = observations.trainer_cpu_s / max(1, observations.num_delivered)
    if setup.worker_type == "thread":  # the workers' CPU time is the trainer's, too
        trainer_cpu_s = max(0.0, trainer_cpu_s - float(batches["cpu_ns"].mean()) / 1e9)
    window, machine = window_of(batches, setup.num_workers, trainer_cpu_s), room_for(observations, keeps_limit=False)
    if window is None:
        return ()
    number = window.needed_workers(machine)
    gain = window.expected_rate(number, machine.num_cores) / window.rate - 1
    if number <= setup.num_workers or gain < _MIN_GAIN:
        return ()
    action = f"{option}={number}"
    if option == SWIFT_LOADER and not setup.is_in_flight_chosen and setup.max_in_flight < number:
        action += " and data_queue_size=None"  # which grows with the workers, as the DataLoader's does anyway
    return (Advice(action, gain),)
