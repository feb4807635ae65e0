"""Measures how long passes last, and the CPU time of the process in them.

A pass begins with its first `next`. It ends with its last one: the `next` that met the end, or else the last that gave
a batch. What the process does between two passes, such as validation, doesn't count.

The loop's thread uses it. Any thread may read.
"""

from __future__ import annotations

import time

__all__ = ["PassClock"]

_NS_PER_READING = 1_000_000
"""CPU time is read at most so often, because that is a system call of half a microsecond."""


class PassClock:
    """Adds up the passes of a loader."""

    def __init__(self) -> None:
        self.is_running = False
        """Whether a pass has begun and not ended."""
        self.number = 0
        """How many passes have begun."""
        self._began_ns = 0
        """When the pass began, if one is running. Set together with the next three."""
        self._last_ns = 0
        """The end of its last `next`."""
        self._cpu_began_ns = 0
        self._cpu_last_ns = 0
        self._read_again_ns = 0
        """When the CPU time is read next."""
        self._elapsed_ns = 0
        """Of the passes that have ended."""
        self._cpu_ns = 0

    def begin(self, now_ns: int) -> None:
        """Begin a pass. There must be none."""
        self._began_ns = self._last_ns = now_ns
        self._cpu_began_ns = self._cpu_last_ns = time.process_time_ns()
        self._read_again_ns = now_ns + _NS_PER_READING
        self.is_running = True
        self.number += 1

    def note_next(self, now_ns: int) -> None:
        """Record the end of a `next` of the pass."""
        self._last_ns = now_ns
        if now_ns >= self._read_again_ns:
            self._read_cpu(now_ns)

    def end(self, now_ns: int | None = None) -> None:
        """End the pass, if there is one. None: it ended with its last `next`."""
        if not self.is_running:
            return
        if now_ns is not None:
            self._last_ns = now_ns
            self._read_cpu(now_ns)
        self.is_running = False
        self._elapsed_ns += self._last_ns - self._began_ns
        self._cpu_ns += max(0, self._cpu_last_ns - self._cpu_began_ns)  # in a fork, the clock began again

    @property
    def elapsed_s(self) -> float:
        """How long all passes have lasted."""
        running_ns = self._last_ns - self._began_ns if self.is_running else 0
        return (self._elapsed_ns + running_ns) / 1e9

    @property
    def cpu_s(self) -> float:
        """CPU time of the process in them, over all threads. Up to 1 ms of each pass may be missing."""
        running_ns = max(0, self._cpu_last_ns - self._cpu_began_ns) if self.is_running else 0
        return (self._cpu_ns + running_ns) / 1e9

    def _read_cpu(self, now_ns: int) -> None:
        self._cpu_last_ns = time.process_time_ns()
        self._read_again_ns = now_ns + _NS_PER_READING

    def __repr__(self) -> str:
        return f"<PassClock {'in a pass' if self.is_running else 'between passes'}, {self.elapsed_s:.3f} s>"
