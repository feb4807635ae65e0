"""How many workers the machine has room for, now."""

from __future__ import annotations

import sys

import numpy as np

from swift_loader.metrics.machine import available_memory
from swift_loader.metrics.observations import Observations
from swift_loader.tuning.limits import most_workers
from swift_loader.tuning.window import Machine

__all__ = ["room_for"]


def room_for(observations: Observations) -> Machine:
    """Return what the workers of a rank may use. The ranks of a machine share it evenly."""
    setup, nbytes = observations.setup, observations.batches["nbytes"]
    num_cores = setup.num_cores / max(1, setup.world_size_here)
    free_nbytes = (available_memory() or sys.maxsize) // max(1, setup.world_size_here)
    batch_nbytes = int(np.median(nbytes)) if nbytes.size else 0
    return Machine(num_cores, most_workers(num_cores, free_nbytes, batch_nbytes, setup.num_workers))
