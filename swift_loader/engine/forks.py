"""Tracks forks of the trainer: a child shares the slots that are leased at that moment.

A forked child has the batches that its parent had, as mappings of the same memory, and may keep them for as long as it
lives; nobody tells the parent when it lets them go. So memory that was lent out at the time of a fork is never written
again. A fork that runs no Python code, as `posix_spawn` does, replaces the child's memory and needs none of this.

A child also has copies of all descriptors. One that is forked while an interpreter is being started would hold open the
pipe on which that start waits. So forks wait for the few milliseconds of a start.

The hooks run in every fork of the process, on whichever thread forks. They take no other lock: another thread might
hold it, which the child doesn't have.
"""

from __future__ import annotations

import os
import threading

from swift_loader.errors import SwiftLoaderError

__all__ = ["FORKS", "Forks", "check_process"]


class Forks:
    """Tells whether there was a fork between two moments; any thread."""

    def __init__(self) -> None:
        self.stamp = object()
        """Replaced when a fork begins and when it has ended, so that one that is kept tells of the forks since."""
        self.starting = threading.RLock()
        """Held while an interpreter is being started, and while a thread forks."""
        self._is_under_way = False
        """Whether a thread is forking; changed by the one that holds `starting`."""

    def may_have_seen(self, stamp: object) -> bool:
        """Return whether a child may have what was lent out from when `stamp` was the present one until now."""
        return self.stamp is not stamp or self._is_under_way

    def begin(self) -> None:
        """Take note that this thread is about to fork."""
        self.starting.acquire()
        self._is_under_way = True
        self.stamp = object()

    def end(self) -> None:
        """Take note that this thread has forked, or has failed to."""
        self.stamp = object()  # first: what is lent out meanwhile may be in the child as well
        self._is_under_way = False
        self.starting.release()

    def forget(self) -> None:
        """Begin anew, in the child: the threads of the parent aren't here."""
        self.stamp = object()
        self.starting = threading.RLock()
        self._is_under_way = False

    def __repr__(self) -> str:
        return f"<Forks{', one under way' * self._is_under_way}>"


FORKS = Forks()
"""Of this process. Global, because a hook can't be taken back: one that each loader registered would outlive it."""


def check_process(owner_pid: int) -> None:
    """Refuse to go on in a fork of the process whose workers they are.

    To be called before any lock is taken: a thread that isn't in this process may have held it.

    Raises:
        SwiftLoaderError: This is another process.
    """
    if os.getpid() != owner_pid:
        raise SwiftLoaderError(
            f"this process (pid {os.getpid()}) is a fork of the one that the loader was started in (pid {owner_pid}): "
            f"the workers, and the batches that come from them, are that one's. Make a loader of its own in this "
            f"process, after the fork; the other one goes on as if nothing had happened"
        )


os.register_at_fork(before=FORKS.begin, after_in_parent=FORKS.end, after_in_child=FORKS.forget)
