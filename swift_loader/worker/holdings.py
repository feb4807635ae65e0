"""What a process holds that a fork of it can't safely share.

Forks share the offset of an open file, whoever opened it, and the data of a socket or a pipe: two workers that read
from one get each other's bytes. And a fork has none of the threads, but all of the locks that they held.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["Holdings"]

_MAX_SHOWN = 5

_SETTLING_S = 0.1
_LOOK_EVERY_MS = 2

_STATELESS = frozenset(os.makedev(1, minor) for minor in (3, 5, 7, 8, 9))
"""The devices null, zero, full, random and urandom, from Linux's devices.txt: all readers are alike to them."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Descriptors and threads, apart from the loader's own."""

    descriptors: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def now(cls, own_descriptors: Iterable[int], own_threads: Iterable[int]) -> Holdings:
        """Return what this process holds besides what is the loader's; standard streams count like all others."""
        own = set(own_descriptors)
        described = (_describe(number) for number in map(int, os.listdir("/proc/self/fd")) if number not in own)
        threads = set(os.listdir("/proc/self/task")) - {str(number) for number in (os.getpid(), *own_threads)}
        return cls(frozenset(filter(None, described)), frozenset(threads))

    @classmethod
    def of_streams(cls) -> Holdings:
        """Return what the standard streams are: forks share them in any case."""
        return cls(frozenset(filter(None, map(_describe, range(3)))), frozenset())

    @classmethod
    def settled(cls, own_descriptors: Collection[int], own_threads: Collection[int]) -> Holdings:
        """Return what is held once threads that have ended are gone from /proc, which may take some ms after a join."""
        deadline_s = time.monotonic() + _SETTLING_S
        while True:
            found = cls.now(own_descriptors, own_threads)
            known = {str(thread.native_id) for thread in threading.enumerate()}
            if found.threads <= known or time.monotonic() > deadline_s:
                return found
            select.poll().poll(_LOOK_EVERY_MS)

    def beyond(self, before: Holdings, doing: str) -> str:
        """Return in words what was opened and started since `before`, by doing something; empty if nothing was."""
        opened = sorted(self.descriptors - before.descriptors)
        started = len(self.threads - before.threads)
        parts = []
        if opened:
            more = f" and {len(opened) - _MAX_SHOWN} more" if len(opened) > _MAX_SHOWN else ""
            parts.append(f"{doing} opened descriptors {', '.join(opened[:_MAX_SHOWN])}{more}")
        if started:
            parts.append(f"{doing} left {started} threads running")
        return "; ".join(parts)


def _describe(number: int) -> str:
    """Return number and target of a descriptor; empty if it is gone, or holds nothing that could be shared."""
    try:
        status = os.fstat(number)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev in _STATELESS:
            return ""
        return f"{number} ({os.readlink(f'/proc/self/fd/{number}')})"
    except OSError:  # the one that listed the folder
        return ""
