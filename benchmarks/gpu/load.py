"""Keeps all cores busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy_cores"]

_PROGRAM = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:  # ends by itself if the benchmark is killed
    sum(range(100_000))
"""


@contextmanager
def busy_cores() -> Iterator[None]:
    """Have as many processes as there are cores do nothing but count, until the context is left, in whatever way."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in os.sched_getaffinity(0):
            processes.append(  # noqa: PERF401 - each one counts from when it exists
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C is for the benchmark, which ends them
                )
            )
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it counts from here on
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
