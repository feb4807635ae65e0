"""Makes a window of what was measured. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations, are_of_one_pass
from swift_loader.tuning.window import Window

__all__ = ["batches_since", "window_of"]

_NS_PER_S = 1e9

PAUSE_S = 1.0
PAUSE_FACTOR = 20
"""A loop that takes at least so long between two batches, and so many times as long as usually, did something else: it
evaluated, or saved a checkpoint."""


def batches_since(observations: Observations, since_ns: int) -> NDArray[np.void]:
    """Return the observed batches that the loop asked for after this reading of the clock."""
    batches = observations.batches
    return batches[batches["asked_ns"] >= since_ns]


def window_of(batches: NDArray[np.void], num_workers: int, trainer_cpu_s: float) -> Window | None:
    """Return the means over these batches, oldest first; None if there are fewer than two.

    Args:
        batches: Of dtype `BATCH`.
        num_workers: How many workers built them.
        trainer_cpu_s: CPU time of the trainer per batch.
    """
    if len(batches) < 2:  # noqa: PLR2004 - the loop's own time is that between two batches
        return None
    waits = batches["delivered_ns"] - batches["asked_ns"]
    steps = batches["asked_ns"][1:] - batches["delivered_ns"][:-1]
    steps = steps[are_of_one_pass(batches)]  # between two passes, the loop does something else
    waited_s = float(waits.mean()) / _NS_PER_S
    step_s = _mean_step_s(steps / _NS_PER_S)
    builds = (batches["fetch_ns"] + batches["collate_ns"] + batches["encode_ns"]).astype(np.float64)
    delays = batches["run_delay_ns"]
    was_measured = delays >= 0
    delay_ns = float(delays[was_measured].mean()) if was_measured.any() else 0.0
    cpu_ns = float(batches["cpu_ns"].mean())
    service_ns = max(float(builds.mean()) - delay_ns, min(cpu_ns, float(builds.mean())))
    return Window(
        num_workers=num_workers,
        seconds=max((waited_s + step_s) * len(batches), 1 / _NS_PER_S),
        num_batches=len(batches),
        waited_s=waited_s,
        step_s=step_s,
        service_s=service_ns / _NS_PER_S,
        cpu_s=cpu_ns / _NS_PER_S,
        trainer_cpu_s=trainer_cpu_s,
    )


def _mean_step_s(steps_s: NDArray[np.float64]) -> float:
    """Return the mean of the loop's own times, without pauses."""
    if not steps_s.size:
        return 0.0
    pause_s = max(PAUSE_S, PAUSE_FACTOR * float(np.median(steps_s)))
    return float(steps_s[steps_s < pause_s].mean())
