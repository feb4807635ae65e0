"""How many workers a machine has room for. Pure."""

from __future__ import annotations

import math

__all__ = ["first_guess", "most_workers"]

MAX_WORKERS = 64
MIN_LIMIT = 4
"""A machine with one core may still have so many: they may wait for a disk or a network."""

WORKERS_PER_CORE = 8

MEMORY_SHARE = 0.5
"""Of the free memory, for further workers."""

WORKER_NBYTES = 64 << 20
"""A worker's own memory. It is forked, so it shares the dataset."""

TYPICAL_STEP_S = 0.05
"""Of a loop, for the first guess."""

BATCHES_IN_FLIGHT = 3
"""Of each further worker."""


def most_workers(num_cores: float, free_nbytes: int, batch_nbytes: int, num_workers: int) -> int:
    """Return how many workers a rank may have at most.

    Args:
        num_cores: Cores of the rank.
        free_nbytes: Memory that the rank may still use.
        batch_nbytes: Size of a batch.
        num_workers: Workers that it has now.
    """
    by_cores = min(MAX_WORKERS, max(MIN_LIMIT, math.ceil(WORKERS_PER_CORE * num_cores)))
    more_by_memory = int(free_nbytes * MEMORY_SHARE / (WORKER_NBYTES + BATCHES_IN_FLIGHT * batch_nbytes))
    return max(1, min(by_cores, num_workers + more_by_memory))


def first_guess(build_s: float, num_cores: float) -> int:
    """Return how many workers to start with, before anything is known about the loop.

    Args:
        build_s: How long a worker took for a batch; infinite if unknown.
        num_cores: Cores of the rank.
    """
    most = max(1, int(num_cores))
    return most if math.isinf(build_s) else min(most, max(1, math.ceil(build_s / TYPICAL_STEP_S)))
