"""CPU times of processes and of their threads, from /proc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

__all__ = ["busiest_s", "process_cpu_s", "thread_cpu_s"]


def process_cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of processes, over all their threads. Those that have ended count 0."""
    total_s = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return total_s


def thread_cpu_s(process: psutil.Process) -> dict[int, float]:
    """Return the CPU time of each thread, by its id."""
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def busiest_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the CPU time between two readings of the thread that took most."""
    return max(cpu_s - before.get(thread, 0.0) for thread, cpu_s in after.items())
