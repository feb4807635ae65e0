"""Tracks forks of the trainer, because a child shares the slots that are leased at that moment.

A forked child maps the same memory as its parent, so it has its parent's batches too. It may keep them for its whole
life, and nothing tells the parent when it drops them. So a slot that was leased during a fork is never written again. A
fork that runs no Python code, as in `posix_spawn`, replaces the child's memory and needs none of this.

A child also has copies of all descriptors. A child that is forked while an interpreter starts would hold open the pipe
on which that start waits. So a fork waits until the start is over, a few milliseconds.

The hooks run in every fork of the process, on the thread that forks. They take no other lock: another thread might hold
it, and that thread doesn't exist in the child.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet


class Holder(Protocol):
    """Owns descriptors of a loader, and is in `FORKS.holders` as long as it lives.

    It forgets a descriptor before it closes it. A fork of the trainer closes those that it finds here: one that was
    closed already may be another file by then.
    """

    def descriptors(self) -> list[int]:
        """Return the descriptors; -1 stands for one that is closed."""


class Forks:
    """Tells whether there was a fork between two moments. Thread-safe."""

    def __init__(self) -> None:
        self.stamp = object()
        """A new object at the begin and at the end of each fork. A caller that kept an old one sees that it changed."""
        self.starting = threading.RLock()
        """Held while an interpreter starts and while a thread forks."""
        self.holders: WeakSet[Holder] = WeakSet()
        """Who owns descriptors of the loaders, which a fork that serves a loader must not keep."""
        self._is_under_way = False
        """Whether a thread is forking. Only the thread that holds `starting` changes it."""

    def may_have_seen(self, stamp: object) -> bool:
        """Return whether a child may have memory that was leased when `stamp` was current and is released now."""
        return self.stamp is not stamp or self._is_under_way

    def begin(self) -> None:
        """Record that this thread is about to fork."""
        self.starting.acquire()
        self._is_under_way = True
        self.stamp = object()

    def end(self) -> None:
        """Record that this thread has forked or has failed to fork."""
        self.stamp = object()  # first, because the child may also have what was leased during the fork
        self._is_under_way = False
        self.starting.release()

    def forget(self) -> None:
        """Reset in the child, where the parent's threads don't exist."""
        self.stamp = object()
        self.starting = threading.RLock()
        self._is_under_way = False


FORKS = Forks()
"""One per process. Global, because a fork hook can't be unregistered: a hook per loader would outlive the loader."""


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=FORKS.begin, after_in_parent=FORKS.end, after_in_child=FORKS.forget)
