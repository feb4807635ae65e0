"""How many cores this process may use: those of its affinity, and what its cgroup allows."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["available_cores", "cores_of"]

_V2 = "/sys/fs/cgroup/cpu.max"
_V1_QUOTA, _V1_PERIOD = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"


def available_cores() -> float:
    """Return the number of cores, a fraction if a cgroup allows one."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores_of(own, _read(_V2) or f"{_read(_V1_QUOTA) or 'max'} {_read(_V1_PERIOD)}")


def cores_of(num_cores: int, limit: str) -> float:
    """Return how many of the cores a cgroup allows.

    Args:
        num_cores: Cores of the affinity.
        limit: `QUOTA PERIOD` in microseconds, as in `cpu.max`; a quota of `max` or -1 is no limit.
    """
    quota, _, period = limit.strip().partition(" ")
    with suppress(ValueError, ZeroDivisionError):
        if float(quota) > 0:
            return min(float(num_cores), float(quota) / float(period))
    return float(num_cores)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
