"""What a process and its children use, over time: descriptors, threads, children and memory."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.helpers import loader_processes

_NUM_SAME = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What a process has open, and the processes of its loaders. Threads are those of Python."""

    descriptors: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Measured:
        """Return this process's."""
        process = psutil.Process()
        gc.collect()
        return cls(process.num_fds(), threading.active_count(), len(loader_processes()))

    @classmethod
    def steady(cls) -> Measured:
        """Return this process's, once it stays the same: a descriptor that a worker sends is open for a moment."""
        seen = [cls.now()]
        while len(seen) < _NUM_SAME or len(set(seen[-_NUM_SAME:])) > 1:
            time.sleep(0.005)
            seen.append(cls.now())
        return seen[-1]


def memory_of(pid: int) -> tuple[int, int]:
    """Return KB of ordinary and of shared memory, both proportional."""
    fields = dict.fromkeys(("Pss_Anon", "Pss_Shmem"), 0)
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it hung, and its killing took until now
        return 0, 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in fields:
            fields[name] = int(rest.split()[0])
    return fields["Pss_Anon"], fields["Pss_Shmem"]
