"""Finds descriptors and threads that make it unsafe to fork a process.

Forks share the offset of an open file, and the data of a socket or a pipe: two workers that read from one get each
other's bytes. A fork has none of the parent's other threads, but all the locks that those threads held. Threads of a
memory allocator don't count: an allocator has to be usable in a fork, so it takes its locks before each one.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAX_SHOWN = 5

_SETTLING_S = 0.1
_LOOK_EVERY_MS = 2

_ALLOCATORS = frozenset({"jemalloc_bg_thd"})
"""Threads of memory allocators, by name. pyarrow starts one when it is imported."""

_STATELESS = frozenset(os.makedev(1, minor) for minor in (3, 5, 7, 8, 9))
"""The devices null, zero, full, random and urandom, from Linux's devices.txt. They have no state to share."""


@dataclass(frozen=True, slots=True)
class ForkHazards:
    """Descriptors and threads of a process, without the loader's own."""

    descriptors: frozenset[str]
    threads: frozenset[str]
    are_known: bool = True
    """False if /proc isn't mounted."""

    @classmethod
    def now(cls, own_descriptors: Iterable[int], own_threads: Iterable[int]) -> ForkHazards:
        """Return this process's descriptors and threads, without the loader's own. Standard streams are included."""
        if not Path("/proc/self/fd").is_dir():
            return cls(frozenset(), frozenset(), are_known=False)
        own = set(own_descriptors)
        described = (_describe(number) for number in map(int, os.listdir("/proc/self/fd")) if number not in own)
        threads = set(os.listdir("/proc/self/task")) - {str(number) for number in (os.getpid(), *own_threads)}
        counting = (thread for thread in threads if _thread_name(thread) not in _ALLOCATORS)
        return cls(frozenset(filter(None, described)), frozenset(counting))

    @classmethod
    def of_streams(cls) -> ForkHazards:
        """Return the standard streams only. Forks share them in any case."""
        return cls(frozenset(filter(None, map(_describe, range(3)))), frozenset())

    @classmethod
    def settled(cls, own_descriptors: Collection[int], own_threads: Collection[int]) -> ForkHazards:
        """Return what `now` returns, after waiting for ended threads to leave /proc: some ms after a join."""
        deadline_s = time.monotonic() + _SETTLING_S
        while True:
            found = cls.now(own_descriptors, own_threads)
            known = {str(thread.native_id) for thread in threading.enumerate()}
            if found.threads <= known or time.monotonic() > deadline_s:
                return found
            select.poll().poll(_LOOK_EVERY_MS)

    def beyond(self, before: ForkHazards, doing: str) -> str:
        """Describe what was opened and started since `before`; empty if nothing was. `doing` names the cause."""
        if not self.are_known:
            return f"/proc isn't mounted, so nothing tells whether {doing} opened files or started threads"
        opened = sorted(self.descriptors - before.descriptors)
        started = len(self.threads - before.threads)
        parts = []
        if opened:
            more = f" and {len(opened) - _MAX_SHOWN} more" if len(opened) > _MAX_SHOWN else ""
            parts.append(f"{doing} opened descriptors {', '.join(opened[:_MAX_SHOWN])}{more}")
        if started:
            parts.append(f"{doing} left {started} threads running")
        return "; ".join(parts)


def _thread_name(thread: str) -> str:
    """Return the kernel's name of one of this process's threads; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").strip()
    return ""


def _describe(number: int) -> str:
    """Return a descriptor's number and target; empty if it is closed or has no state to share."""
    try:
        status = os.fstat(number)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev in _STATELESS:
            return ""
        return f"{number} ({os.readlink(f'/proc/self/fd/{number}')})"
    except OSError:  # the descriptor that listed the folder is closed by now
        return ""
