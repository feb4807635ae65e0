"""How many workers the machine has room for, now."""

from __future__ import annotations

import sys

import numpy as np

from swift_loader.metrics.machine import available_memory
from swift_loader.metrics.observations import Observations, Setup
from swift_loader.tuning.limits import first_guess, most_workers
from swift_loader.tuning.window import Machine

__all__ = ["first_number", "room_for"]


def first_number(setup: Setup, build_s: float) -> int:
    """Return how many workers to start with.

    Args:
        setup: What the loader has.
        build_s: How long a worker took for a batch; infinite if unknown.
    """
    return max(setup.num_workers, min(first_guess(build_s, _cores_of(setup)), _most_busy(setup)))


def room_for(observations: Observations, *, keeps_limit: bool = True) -> Machine:
    """Return what the workers of a rank may use. The ranks of a machine share it evenly.

    With `keeps_limit`, a limit of batches in flight that the user gave stays: more workers than that can't be busy.
    """
    setup, nbytes = observations.setup, observations.batches["nbytes"]
    num_cores = _cores_of(setup)
    free_nbytes = (available_memory() or sys.maxsize) // max(1, setup.world_size_here)
    batch_nbytes = int(np.median(nbytes)) if nbytes.size else 0
    most = most_workers(num_cores, free_nbytes, batch_nbytes, setup.num_workers)
    return Machine(num_cores, min(most, _most_busy(setup)) if keeps_limit else most)


def _cores_of(setup: Setup) -> float:
    """Return the cores of one rank."""
    return setup.num_cores / max(1, setup.world_size_here)


def _most_busy(setup: Setup) -> int:
    """Return how many workers can be busy at once: a limit of batches in flight that the user gave stays."""
    return sys.maxsize if setup.is_in_flight_chosen else setup.max_in_flight
