"""Tells whether this process is the one that made an object, or a fork of it.

A fork has a copy of every object. It has none of the maker's threads, child processes and device contexts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from swift_loader.errors import SwiftLoaderError


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The process that made an object. By default this one."""

    pid: int = field(default_factory=os.getpid)

    def is_here(self, getpid: Callable[[], int] = os.getpid) -> bool:
        """Return whether this process is the owner.

        It reads no global of this module, so finalisers may call it while the interpreter exits.
        """
        return getpid() == self.pid

    def check(self) -> None:
        """Raise `SwiftLoaderError` if this process is a fork of the one that started the workers.

        Call it before taking any lock: a thread that doesn't exist in this process may have held the lock.
        """
        if os.getpid() != self.pid:
            raise SwiftLoaderError(
                f"the loader was started in process {self.pid}, and this process (pid {os.getpid()}) is a fork of it. "
                f"The workers and their batches belong to process {self.pid}, where the loader works as before. Make a "
                f"loader of its own in this process, after the fork"
            )
