"""Root processes, each of which has imported what datasets need, and forks templates on request: the trainer's side.

Usually there is one root, for all loaders of this process. It starts in the background when the first loader is made. A
loader whose environment differs from the root's gets another root, which takes the place of the first one; that exits
when its last template has ended. A module whose import fails, or leaves threads or open files behind, is remembered:
loaders that need it start interpreters of their own. The environment variable SWIFT_LOADER_ROOT=0 switches roots off.

A root has a thread of its own, which lives as long as the root: the kernel kills the root when the thread that started
it ends. `swift_loader.worker.root` is the other side.

    WANTED ──start──► RUNNING ──refusal, retire──► RETIRED ──last template──► ended        by `refusal` and the process
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from dataclasses import replace
from functools import partial
from typing import Any

from swift_loader.errors import ProtocolError, SwiftLoaderError
from swift_loader.executors.fleet import or_killed, stop_processes
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.loop_thread import LoopThread, Stopped
from swift_loader.executors.process.template import ServerLaunch, ServerProcess
from swift_loader.runtime import Answer
from swift_loader.transport.channel import Channel, duplicate, explaining_limits
from swift_loader.transport.messages import Blank, Exited, Fork, Forked, Refused, Warmed
from swift_loader.worker.process import has_greenlets, is_importing

SWITCH = "SWIFT_LOADER_ROOT"


class BlankTemplate:
    """A fork of the root that was asked for, before it knows which loader it serves. Closed, it exits.

    It waits for its descriptors; see `Start` for the process that it is then.
    """

    def __init__(self) -> None:
        """Ask for nothing yet. Raises `NoDescriptorsLeft`."""
        self.forked: Answer[int] = Answer()
        """Its process id, or `RootRefused`."""
        self.ended: Answer[int] = Answer()
        """Its exit code, once it has ended and the root has said so. It never comes if the root ends first."""
        self.waiter: LoopThread | None = None
        """The thread that waits for `forked`."""
        self._channel, self.theirs = Channel.pair()
        """`theirs` is for the fork alone; whoever sends it closes it here."""
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 for those that are closed."""
        return [self._channel.fileno(), self.theirs.fileno()]

    def start(self, channel: int, traces: int, stderr: int) -> BlankTemplate:
        """Make it a template, which gets copies of the descriptors. If it is gone, the trainer notices that later."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(Fork(0, in_place=True).pack(), (channel, traces, stderr))
        self.close()
        return self

    def close(self) -> None:
        """Let it exit, unless it was started. Idempotent."""
        self._channel.close()

    def answer(self, pid: int | None, refusal: RootRefused | None = None) -> None:
        """Say that it was forked, or that there is no fork. The root's thread."""
        if refusal is not None:
            self.close()
            self.theirs.close()
        self.forked.give(pid, refusal)
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            with contextlib.suppress(OSError):  # it is being closed
                waiter.wake()

    @property
    def pid(self) -> int:
        """Its process id, once it is forked."""
        return self.forked.result()

    @property
    def returncode(self) -> int | None:
        """The exit code; None if it isn't known."""
        return self.ended.result() if self.ended.is_given else None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, once it has ended."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("a fork of the root", timeout or 0.0)
        return self.ended.result()


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
        self._process: ServerProcess | None = None
        self._num_requests = 0
        self._asked: dict[int, tuple[tuple[str, ...], BlankTemplate | None]] = {}
        """The requests that weren't answered, by number: the modules, and the fork if one is wanted."""
        self._templates: dict[int, BlankTemplate] = {}
        """Those that haven't ended, by the number of the request."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of its process; -1 for those that are closed."""
        return [*super().descriptors(), -1 if self.is_closed else self._launch.directory]

    # Any thread -------------------------------------------------------------------------------------------------------

    def warm(self, modules: tuple[str, ...]) -> None:
        """Have it import modules."""
        self.submit(partial(self._ask, modules, None))

    def fork(self, modules: tuple[str, ...]) -> BlankTemplate:
        """Have it import modules, and fork. Raises `NoDescriptorsLeft`."""
        blank = BlankTemplate()
        if not self.submit(partial(self._ask, modules, blank)):
            blank.answer(None, RootRefused("it has ended"))
        return blank

    def retire(self) -> None:
        """Let it exit once its templates have ended. Idempotent."""
        self.submit(self._retire)

    def kill(self) -> None:
        """End it, and with it all its templates. Idempotent."""
        self.submit(self._kill)

    def close(self) -> None:
        """End it, and its templates if they don't end first; close everything. Blocks for 2.2 s at most. Idempotent."""
        with self.lock:
            self.stop()
        process = self._process
        try:
            if process is not None:
                with or_killed([process]):
                    process.request_exit()
                    stop_processes([process])
        finally:
            self.end()
        if not self.is_closed:
            self.close_loop()
            self._launch.close()
            if process is not None:
                process.close()

    # Its thread -------------------------------------------------------------------------------------------------------

    def _ask(self, modules: tuple[str, ...], blank: BlankTemplate | None) -> None:
        if not self.is_open:
            self.refusal = self.refusal or RootRefused("it has ended")
        if self.refusal is None and self._process is None:
            self._start()
        refusal = self.refusal
        if refusal is None:
            assert self._process is not None
            self._num_requests += 1
            self._asked[self._num_requests] = modules, blank
            try:
                theirs = [] if blank is None else [blank.theirs.fileno()]
                self._process.send(Blank(self._num_requests, modules).pack(), *theirs)
            except (OSError, ProtocolError) as error:  # no descriptors are left, or there are too many modules
                del self._asked[self._num_requests]
                refusal = RootRefused(str(error))
        if blank is not None:
            blank.theirs.close()
            if refusal is not None:
                blank.answer(None, refusal)

    def _start(self) -> None:
        try:
            with self.lock, explaining_limits():  # so that `close` doesn't miss it
                self.check_open()
                self._process = process = ServerProcess(replace(self._launch, program="root"))
        except Stopped:
            self._refuse(RootRefused("it has ended"))
            return
        except (OSError, SwiftLoaderError) as error:
            self._refuse(RootRefused(f"it can't be started: {error}"))
            self.end()
            return
        self.watch(process.diagnostics.fileno(), process.diagnostics)
        for descriptor in (process.fileno(), process.pidfd):
            self.watch(descriptor, process)

    def take_in(self, source: ServerProcess) -> None:
        """Take in what its process has sent, or that it has ended, and its templates with it."""
        try:
            for message, _ in source.messages():
                self._note(message)
        except ProtocolError as error:
            self._refuse(RootRefused(str(error)))
            source.kill()
        else:
            if not source.is_gone:
                return
        self.unwatch(source.fileno())
        if source.has_ended:
            source.wait_exit_code()
            importing = [modules for modules, _ in self._asked.values()]
            self.note_failure(RootRefused("it has ended", tuple(name for modules in importing[:1] for name in modules)))

    def _note(self, message: Any) -> None:
        if isinstance(message, Forked):
            _, blank = self._asked.pop(message.worker)
            assert blank is not None
            self._templates[message.worker] = blank
            blank.answer(message.pid)
        elif isinstance(message, Exited):
            self._templates.pop(message.worker).ended.give(message.exit_code)
        elif isinstance(message, Warmed):
            del self._asked[message.serial]
        elif isinstance(message, Refused):
            modules, _ = self._asked[message.serial]
            self._refuse(RootRefused(message.reason, () if message.is_stale else modules))
            if self._process is not None:
                self._process.end_requests()
        else:
            raise ProtocolError(f"a root sent an unexpected message: {type(message).__name__}")

    def _retire(self) -> None:
        self.refusal = self.refusal or RootRefused("it was retired")
        if self._process is None:
            self.end()
        else:
            self._process.end_requests()  # it answers what was asked before

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _refuse(self, refusal: RootRefused) -> None:
        self.refusal = self.refusal or refusal
        asked, self._asked = self._asked, {}
        for _, blank in asked.values():
            if blank is not None:
                blank.answer(None, self.refusal)

    def note_failure(self, error: BaseException) -> None:
        """End the thread: nothing comes from the root any more."""
        self._refuse(error if isinstance(error, RootRefused) else RootRefused(f"{type(error).__name__}: {error}"))
        self._templates.clear()
        if (process := self._process) is not None:
            self.unwatch(process.pidfd, process.fileno(), process.diagnostics.fileno())
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
                    root.warm(tuple(name for name in modules if name not in self._unfit))
            finally:
                launch.close()

    def fork(self, launch: ServerLaunch, modules: tuple[str, ...], *, may_start: bool) -> BlankTemplate | None:
        """Ask for a template, a fork of the root. Returns at once.

        `launch`: the environment that the template must have. `modules`: what it will import. `may_start`: start
        another root if the current one has another environment.

        If it is refused, a second call may have more success. Returns None if there is no root for this.
        """
        with self._lock:
            self._look_after()
            if not _are_on() or not self._unfit.isdisjoint(modules):
                return None
            root = self._root_for(launch, may_start=may_start)
            return None if root is None else root.fork(modules)

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
