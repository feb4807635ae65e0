"""Root processes, each of which has imported what datasets need, and forks on request: the trainer's side.

Usually there is one root, for all loaders of this process. It starts in the background when the first loader is made. A
loader whose environment differs from the root's gets another root, which takes the place of the first one; that exits
when what it has forked has ended. A module whose import fails, or leaves threads or open files behind, is remembered:
loaders that need it start interpreters of their own. The environment variable SWIFT_LOADER_ROOT=0 switches roots off.

A root has a thread of its own, which lives as long as the root: the kernel kills the root when the thread that started
it ends. `swift_loader.worker.root` is the other side.

    WANTED ──start──► RUNNING ──refusal, retire──► RETIRED ──last fork──► ended        by `refusal` and the process
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from functools import partial
from typing import Any

from swift_loader.errors import ProtocolError, SwiftLoaderError
from swift_loader.executors.fleet import or_killed, stop_processes
from swift_loader.executors.process.launch import ServerLaunch
from swift_loader.executors.process.loop_thread import LoopThread, Stopped
from swift_loader.executors.process.server import Process, Server
from swift_loader.transport.channel import duplicate, explaining_limits
from swift_loader.transport.messages import Exited, Fork, Forked, Refused, Warmed
from swift_loader.worker.process import has_greenlets, is_importing

SWITCH = "SWIFT_LOADER_ROOT"


class RootRefused(Exception):
    """The root forks no more: it can't be forked, was retired, or is gone."""

    def __init__(self, reason: str, unfit: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.unfit = unfit
        """The modules whose import may be the reason. No other root should import them."""


class Root(LoopThread):
    """One root process. It starts with the first request. Any thread may call its methods.

    They return at once, or once a process that is being started exists.
    """

    def __init__(self, launch: ServerLaunch, conditions: tuple[object, ...]) -> None:
        """Start nothing. `launch` starts the interpreter, and is closed with this object."""
        super().__init__("root")
        self.conditions = conditions
        self.refusal: RootRefused | None = None
        """Why it forks no more. Written once, by its thread."""
        self._launch = launch
        self._server: Server | None = None
        self._num_requests = 0
        self._asked: dict[int, tuple[tuple[str, ...], Process | None]] = {}
        """The requests that weren't answered, by number: the modules, and what is to be forked."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of its process; -1 for those that are closed."""
        return [*super().descriptors(), -1 if self.is_closed else self._launch.directory]

    # Any thread -------------------------------------------------------------------------------------------------------

    def ask(self, modules: tuple[str, ...], process: Process | None = None) -> None:
        """Have it import modules, and then be forked: the process runs, or is refused. None: only import them."""
        if not self.submit(partial(self._ask, modules, process)) and process is not None:
            process.refuse()

    def retire(self) -> None:
        """Let it exit once its forks have ended. Idempotent."""
        self.submit(self._retire)

    def kill(self) -> None:
        """End it, and with it all its forks. Idempotent."""
        self.submit(self._kill)

    def close(self) -> None:
        """End it, and its forks if they don't end first; close everything. Blocks for 2.2 s at most. Idempotent."""
        with self.lock:
            self.stop()
        server = self._server
        try:
            if server is not None:
                with or_killed([server]):
                    server.request_exit()
                    stop_processes([server])
        finally:
            self.end()
        if not self.is_closed:
            self.close_loop()
            self._launch.close()
            if server is not None:
                server.close()

    # Its thread -------------------------------------------------------------------------------------------------------

    def _ask(self, modules: tuple[str, ...], process: Process | None) -> None:
        if not self.is_open:
            self.refusal = self.refusal or RootRefused("it has ended")
        if self.refusal is None and self._server is None:
            self._start()
        number = self._num_requests = self._num_requests + 1
        is_asked = False
        if self.refusal is None and self._server is not None:
            self._asked[number] = modules, process
            with contextlib.suppress(
                OSError, SwiftLoaderError
            ):  # no descriptors are left, or there are too many modules
                if process is None:
                    self._server.send(Fork(number, modules).pack())
                is_asked = process is None or self._server.fork(process, number, modules)
        if not is_asked:
            self._asked.pop(number, None)
            if process is not None:
                process.refuse()

    def _start(self) -> None:
        server = None
        try:
            server = Server(self)
            with self.lock, explaining_limits():  # so that `close` doesn't miss it
                self.check_open()
                server.start(replace(self._launch, program="root"))
                self._server = server
        except (Stopped, OSError, SwiftLoaderError) as error:
            if server is not None:
                server.close()
            is_stopped = isinstance(error, Stopped)
            self._refuse(RootRefused("it has ended" if is_stopped else f"it can't be started: {error}"))
            if not is_stopped:
                self.end()
            return
        server.listen()

    def take_in(self, source: Server) -> None:
        """Take in what its process has sent, or that it has ended, and its forks with it."""
        try:
            for message in source.messages():
                self._note(message, source)
        except ProtocolError as error:
            self._refuse(RootRefused(str(error)))
            source.kill()
        else:
            if not source.is_gone:
                return
        self.unwatch(source.channel.fileno())
        if source.has_ended:
            source.reap()
            importing = [modules for modules, _ in self._asked.values()]
            self.note_failure(RootRefused("it has ended", tuple(name for modules in importing[:1] for name in modules)))

    def _note(self, message: Any, source: Server) -> None:
        if isinstance(message, (Forked, Warmed)):
            self._asked.pop(message.serial, None)  # None: it was refused meanwhile, with all that was asked
        elif isinstance(message, Refused):
            modules, _ = self._asked[message.serial]
            self._refuse(RootRefused(message.reason, () if message.is_stale else modules))
            source.end_requests()
        elif not isinstance(message, Exited):
            raise ProtocolError(f"a root sent an unexpected message: {type(message).__name__}")

    def _retire(self) -> None:
        self.refusal = self.refusal or RootRefused("it was retired")
        if self._server is None:
            self.end()
        else:
            self._server.end_requests()  # it answers what was asked before

    def _kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    def _refuse(self, refusal: RootRefused) -> None:
        self.refusal = self.refusal or refusal
        asked, self._asked = self._asked, {}
        for _, process in asked.values():
            if process is not None:
                process.refuse()

    def note_failure(self, error: BaseException) -> None:
        """End the thread: nothing comes from the root any more."""
        self._refuse(error if isinstance(error, RootRefused) else RootRefused(f"{type(error).__name__}: {error}"))
        if self._server is not None:
            self._server.unlisten()
        self.end()


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
        with contextlib.suppress(SwiftLoaderError, OSError):  # a loader that starts will say it
            launch = ServerLaunch()
            try:
                with self._lock:
                    root = self._root_for(launch, may_start=True)
                    assert root is not None
                    root.ask(tuple(name for name in modules if name not in self._unfit))
            finally:
                launch.close()

    def fork(self, process: Process, launch: ServerLaunch, modules: tuple[str, ...], *, may_start: bool) -> bool:
        """Ask for a process that is a fork of the root. Returns at once: it runs or is refused later.

        `launch`: the environment that it must have. `modules`: what it will import. `may_start`: start another root if
        the current one has another environment.

        If it is refused, a second call may have more success. Returns False if there is no root for this.
        """
        with self._lock:
            self._look_after()
            if not _are_on() or not self._unfit.isdisjoint(modules):
                return False
            root = self._root_for(launch, may_start=may_start)
            if root is not None:
                root.ask(modules, process)
            return root is not None

    def give_up(self, modules: tuple[str, ...]) -> None:
        """Kill the root, because it takes too long to import modules."""
        with self._lock:
            self._unfit.update(modules)
            if self._current is not None:
                self._current.kill()
                self._former.append(self._current)
                self._current = None

    def stop(self) -> None:
        """End all roots, and what they have forked for any loader. Blocks for 2.2 s at most for each.

        The next loader starts another one.
        """
        with self._lock:
            roots = [*self._former, *([] if self._current is None else [self._current])]
            self._current, self._former = None, []
        for root in roots:
            root.close()

    def forget(self) -> None:
        """Begin anew in a fork, which has none of the parent's roots."""
        self._lock = threading.Lock()
        self._current, self._former = None, []

    def _root_for(self, launch: ServerLaunch, *, may_start: bool) -> Root | None:
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
        self._current = Root(replace(launch, directory=duplicate(launch.directory)), conditions)
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


def _are_on() -> bool:
    return os.environ.get(SWITCH, "") != "0"


ROOTS = Roots()
"""One per process, because what it saves is repeated by all loaders of a process."""

os.register_at_fork(after_in_child=ROOTS.forget)
