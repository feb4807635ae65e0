"""Puts load on all cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROGRAM = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:  # ends by itself if the benchmark is killed
    sum(range(100_000))
"""


@contextmanager
def busy_cores() -> Iterator[None]:
    """Run one counting process per core until the context ends, also after an error."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in os.sched_getaffinity(0):
            processes.append(  # noqa: PERF401 - each process counts once it exists
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C reaches the benchmark only, and it ends the processes
                )
            )
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it counts from now on
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
