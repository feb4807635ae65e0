"""The root of this process: one interpreter that has imported what datasets need, for all loaders.

It starts in the background when the first loader is made. A loader whose environment differs from the root's gets
another root, which takes the place of the first one; that exits when its last template has ended. A module whose import
fails, or leaves threads or open files behind, is remembered: loaders that need it start interpreters of their own.

The environment variable SWIFT_LOADER_ROOT=0 switches roots off.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import suppress

from swift_loader.errors import SwiftLoaderError
from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.root import BlankTemplate, Root
from swift_loader.worker.process import has_greenlets, is_importing

SWITCH = "SWIFT_LOADER_ROOT"


class Roots:
    """The current root, and former ones that still have templates. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Root | None = None
        self._former: list[Root] = []
        self._unfit: set[str] = set()
        """The modules that no root may import."""

    def warm(self, modules: tuple[str, ...]) -> None:
        """Have the root import modules, and start it if there is none. Returns at once, and raises no error."""
        if is_importing() or has_greenlets() or not _are_on():
            return
        with suppress(SwiftLoaderError, OSError):  # a loader that starts will say it
            launch = Launch.of_this_process()
            try:
                with self._lock:
                    root = self._root_for(launch, may_start=True)
                    assert root is not None
                    root.warm(tuple(name for name in modules if name not in self._unfit))
            finally:
                launch.close()

    def fork(self, launch: Launch, modules: tuple[str, ...], *, may_start: bool) -> Future[BlankTemplate] | None:
        """Ask for a template, a fork of the root. Returns at once.

        `launch`: the environment that the template must have. `modules`: what it will import. `may_start`: start
        another root if the current one has another environment.

        Returns the future, which may hold `RootRefused`; then a second call may have more success. None if there is no
        root for this.
        """
        with self._lock:
            self._look_after()
            if not _are_on() or not self._unfit.isdisjoint(modules):
                return None
            root = self._root_for(launch, may_start=may_start)
            return None if root is None else root.fork(modules)

    def fork_ahead(
        self, launch: Launch, modules: tuple[str, ...]
    ) -> tuple[Future[BlankTemplate], frozenset[str]] | None:
        """Ask for a template before it is known which modules it will need. Returns at once.

        `launch`: the environment that the template must have. `modules`: those that are known already. Returns the
        future, as that of `fork`, and modules that the template will have. None if there is no root that has imported
        those that are known.
        """
        with self._lock:
            self._look_after()
            root = self._root_for(launch, may_start=False) if _are_on() else None
            if root is None or not root.imported or not root.imported.issuperset(modules):
                return None
            return root.fork(modules), root.imported

    def give_up(self, modules: tuple[str, ...]) -> None:
        """Kill the root, because it takes too long to import modules."""
        with self._lock:
            self._unfit.update(modules)
            if self._current is not None:
                self._current.kill()
                self._former.append(self._current)
                self._current = None

    def stop(self) -> None:
        """End all roots, and their templates. Blocks for 2.2 s at most for each. The next loader starts another one."""
        with self._lock:
            roots = [*self._former, *([] if self._current is None else [self._current])]
            self._current, self._former = None, []
        for root in roots:
            root.close()

    def forget(self) -> None:
        """Begin anew in a fork, which has none of the parent's roots."""
        self._lock = threading.Lock()
        self._current, self._former = None, []

    def _root_for(self, launch: Launch, *, may_start: bool) -> Root | None:
        self._look_after()
        conditions = launch.conditions()
        root = self._current
        if root is not None and root.conditions == conditions:
            return root
        if not may_start:
            return None
        if root is not None:
            root.retire()
            self._former.append(root)
        self._current = Root(launch.copy(), conditions)
        return self._current

    def _look_after(self) -> None:
        """Learn why the current root forks no more, and close those that have ended."""
        root = self._current
        if root is not None and root.refusal is not None:
            self._unfit.update(root.refusal.unfit)
            self._former.append(root)
            self._current = None
        for former in [former for former in self._former if not former.is_open]:
            self._former.remove(former)
            former.close()

    def __repr__(self) -> str:
        return f"<Roots {self._current!r}, {len(self._former)} former>"


def _are_on() -> bool:
    return os.environ.get(SWITCH, "") != "0"


ROOTS = Roots()
"""One per process, because what it saves is repeated by all loaders of a process."""

os.register_at_fork(after_in_child=ROOTS.forget)
