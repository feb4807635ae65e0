"""What is particular to the loader's processes: how they import, end, fork and tell where they are.

They end when their parents end, without Python's tear-down, and with all that they started. Every system can import
this module; what only Linux has is looked for when it is used.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import functools
import gc
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from swift_loader.errors import NoProcessesLeft
from swift_loader.runtime import SIGNALS, LoaderThread
from swift_loader.transport.channel import avoid_std_streams, duplicate, new_eventfd

# The end of a process -------------------------------------------------------------------------------------------------

NO_PROCESSES_LEFT = 71
"""The exit code of a process that could start no thread or process: EX_OSERR, which Windows doesn't name."""

NO_DESCRIPTORS_LEFT = 72
"""The exit code of a process that ran out of file descriptors: EX_OSFILE."""

# The state of the standard library's `multiprocessing` in a process that was forked and ends without it.


def name_child(name: str) -> None:
    """Be no "MainProcess" for `multiprocessing`, and have a parent. Programs look there to do things only once."""
    from multiprocessing import process

    process.current_process().name = name
    threading.current_thread().name = "MainThread"  # a fork may be made by another thread
    with suppress(AttributeError, OSError):  # only Linux has pidfds
        # Private, but what multiprocessing's own children do. The descriptor stays open until the process ends.
        sentinel = os.pidfd_open(os.getppid())
        process._parent_process = process._ParentProcess("MainProcess", os.getppid(), sentinel)  # type: ignore[attr-defined] # noqa: SLF001


def reset_multiprocessing() -> None:
    """Tell `multiprocessing` that this is a new process: its queues and locks must not act for the parent."""
    util = _util()
    if util is not None:
        # Private, but the only way: multiprocessing's own forks call these, and torch registers a function there.
        util._finalizer_registry.clear()  # noqa: SLF001
        util._run_after_forkers()  # noqa: SLF001


def finish_multiprocessing() -> None:
    """Wait until queues have sent what was put into them here. The trainer limits how long that may take."""
    util = _util()
    if util is not None:
        util._run_finalizers()  # noqa: SLF001


def _util() -> ModuleType | None:
    return sys.modules.get("multiprocessing.util")


def use_tracker(descriptor: int) -> None:
    """Have the trainer's resource tracker keep the names of shared memory and semaphores that are made here."""
    from multiprocessing import resource_tracker

    resource_tracker._resource_tracker._fd = descriptor  # type: ignore[attr-defined]  # noqa: SLF001 - as spawn_main does
    share_with_forks(0, descriptor)  # a frozen program's spawn_main has duplicated stdin


def reset_signals(survived: Iterable[int] | None = None) -> None:
    """Reset the signal settings inherited from the trainer, and ignore Ctrl-C: the trainer handles it.

    `survived`: the signals that the program handles, which then do nothing here; None: those that are blocked.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "win32":
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may print, although it isn't in the terminal's foreground
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    survived = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()) if survived is None else survived)
    for number in SIGNALS - {signal.SIGINT, signal.SIGCHLD, DUMP_SIGNAL}:
        if number in survived:
            signal.signal(number, _do_nothing)
        elif callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _do_nothing(*_: object) -> None:
    """Handle a signal. An ignored one would stay ignored in the programs that the dataset starts."""


_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, also if this process is busy or stopped.

    The kernel sends the signal when the parent's *thread* ends. A template and the root fork on their main threads. The
    trainer starts templates on the starter's thread, which lives as long as the processes do, or is forked by its own
    main thread.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@functools.cache  # forks have it, too: making one makes classes
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def lead_group() -> None:
    """Put this process into its own process group. Processes that the dataset starts will be in it, too."""
    with suppress(PermissionError):  # it already leads a session, and so a group
        os.setpgid(0, 0)


def end_group(leader: int) -> None:
    """Send SIGTERM to the rest of an ended process's group. Call it before reaping, while the pid is still valid.

    SIGTERM instead of SIGKILL, because multiprocessing's resource tracker ignores SIGTERM: it must still remove names
    of shared memory.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGTERM)
        os.killpg(leader, signal.SIGCONT)


def flush_streams() -> None:
    """Flush the output buffers of Python and C. Else a fork would print its copy of them once more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, broken, None or the user's own
            stream.flush()
    if sys.platform != "win32":
        _libc().fflush(None)


def fork_quietly() -> int:
    """Fork this process, whatever threads it has. Return as `os.fork` does.

    `warnings.catch_warnings` would forget which warnings were shown.
    """
    filters: Any = warnings.filters
    warnings.filters = [("ignore", None, DeprecationWarning, None, 0), *filters]
    try:
        return os.fork()
    finally:
        warnings.filters = filters


def end_process(exit_code: int) -> NoReturn:
    """End the process without Python's tear-down: a fork must not finalise its copies of the template's objects."""
    flush_streams()
    os._exit(exit_code & 0xFF)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that this error ends."""
    if isinstance(error, NoProcessesLeft):
        return NO_PROCESSES_LEFT
    is_out_of_descriptors = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return NO_DESCRIPTORS_LEFT if is_out_of_descriptors else 1


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Run, and end this process with the exit code that is returned, or that Python gives for what is raised."""
    exit_code = 1
    try:
        exit_code = run()
    except SystemExit as request:
        exit_code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException as error:
        exit_code = exit_code_of(error)
        sys.excepthook(*sys.exc_info())
    finally:
        end_process(exit_code)


# Imports --------------------------------------------------------------------------------------------------------------

# Prevents a loader's process from starting a loader while it imports the dataset's modules, and a start in gevent.
#
# The module that defines a dataset may start a loader when it is imported. In the trainer, the user wants that. The
# template imports the same module to get the dataset; there it would start another template, which imports it again.

_is_importing: ContextVar[bool] = ContextVar("swift_loader_is_importing", default=False)


@contextmanager
def importing() -> Iterator[None]:
    """Make `refuse_start` raise within this context, and show no warning: the trainer shows those of its imports.

    The garbage collector pauses. It would take a tenth of the time of torch's import, and find next to nothing.
    """
    token, shows, thresholds = _is_importing.set(True), warnings.showwarning, gc.get_threshold()
    warnings.showwarning = _show_nothing
    gc.set_threshold(0)
    try:
        yield
    finally:
        _is_importing.reset(token)
        if warnings.showwarning is _show_nothing:  # else a module has set its own
            warnings.showwarning = shows
        if gc.get_threshold()[0] == 0:  # the same
            gc.set_threshold(*thresholds)


def _show_nothing(*_: object, **__: object) -> None:
    """Stand for `warnings.showwarning`."""


def is_importing() -> bool:
    """Return whether this process is a loader's, and is importing the dataset's modules."""
    return _is_importing.get()


def has_greenlets() -> bool:
    """Return whether gevent has put greenlets in the place of threads, or its own wait in the place of the system's."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and any(map(monkey.is_module_patched, ("select", "threading")))


def refuse_start() -> None:
    """Raise `RuntimeError` if this process is a loader's, and is importing the dataset's modules; or in gevent."""
    if has_greenlets():
        raise RuntimeError(
            "gevent has patched this process (gevent.monkey), so the threads that look after worker processes would "
            "hang. Load in a process without the patch, or with 0 workers"
        )
    if _is_importing.get():
        raise RuntimeError(
            "a module starts a loader when it is imported, and this loader's own process imports that module to get "
            "the dataset: that would start processes without end. Start the loader in that module under "
            "if __name__ == '__main__', or in a function"
        )


# Fork safety ----------------------------------------------------------------------------------------------------------

# Finds descriptors and threads that make it unsafe to fork a process.
#
# Forks share the offset of an open file, and the data of a socket or a pipe: two workers that read from one get each
# other's bytes. A fork has none of the parent's other threads, but all the locks that those threads held. Threads of a
# memory allocator don't count: an allocator has to be usable in a fork, so it takes its locks before each one.

_MAX_SHOWN = 5

_SETTLING_S = 0.1
_LOOK_EVERY_MS = 2

ALLOCATORS = frozenset({"jemalloc_bg_thd"})
"""Threads of memory allocators, by name. pyarrow starts one when it is imported, and again in each fork."""

_FOR_FORKS: set[tuple[int, int]] = set()
"""The files, by device and inode, that forks are to share."""

_MEMORY = ("/memfd:swift_loader", "/dev/shm/")  # noqa: S108 - nothing is made there
"""What the links of descriptors of shared memory begin with: ours and multiprocessing's. Nobody uses its offset."""


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
        counting = (thread for thread in threads if _thread_name(thread) not in ALLOCATORS)
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


def share_with_forks(*descriptors: int) -> None:
    """Count these files as no hazard, whatever descriptor they have: forks are to share them."""
    _FOR_FORKS.update((status.st_dev, status.st_ino) for status in map(os.fstat, descriptors))


def _thread_name(thread: str) -> str:
    """Return the kernel's name of one of this process's threads; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").strip()
    return ""


def _describe(number: int) -> str:
    """Return a descriptor's number and target; empty if it is closed, a device, or meant for forks.

    Libraries open devices (a GPU, /dev/urandom) that have no offset to share.
    """
    try:
        status = os.fstat(number)
        if stat.S_ISCHR(status.st_mode) or (status.st_dev, status.st_ino) in _FOR_FORKS:
            return ""
        target = os.readlink(f"/proc/self/fd/{number}")
        return "" if target.startswith(_MEMORY) else f"{number} ({target})"
    except OSError:  # the descriptor that listed the folder is closed by now
        return ""


# Stacks on demand -----------------------------------------------------------------------------------------------------

# For processes that hang or crash. A thread writes the stacks when the trainer asks. A signal also works, even while C
# code holds the GIL. But it would interrupt system calls of C code that doesn't handle that, and so make slow samples
# fail. So the signal is only for processes that are about to be killed.

DUMP_SIGNAL: Any = getattr(signal, "SIGURG", None)
"""Ignored by default, so it does no harm to a process without the handler."""

_FD = struct.Struct("i")


class StackDumper:
    """Writes the stacks of all threads to a pipe: when the trainer asks, on `DUMP_SIGNAL`, and on a fatal signal."""

    def __init__(self, descriptor: int) -> None:
        """Install the handlers of the signals.

        `descriptor`: the socket over which the trainer asks: with a byte. The first one brings the pipe. Both must stay
        open. The trainer has made them non-blocking, so writing never blocks.
        """
        self._asked = descriptor
        self._traces = _take_pipe(descriptor)
        self._stop = -1
        self._thread: threading.Thread | None = None
        faulthandler.disable()  # if it is enabled, enabling it again leaves handlers that a library has set since
        faulthandler.enable(file=self._traces)
        faulthandler.register(DUMP_SIGNAL, file=self._traces)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors in use."""
        return [*{self._asked, self._traces}, *([self._stop] if self._thread is not None else [])]

    @property
    def thread_ids(self) -> list[int]:
        """The kernel's id of the thread; empty if there is no thread."""
        number = self._thread.native_id if self._thread is not None else None
        return [] if number is None else [number]

    def start(self) -> None:
        """Start a thread that answers the trainer's requests."""
        self._stop = new_eventfd()
        self._thread = LoaderThread(self.write_when_asked, "traces")
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Call it before the process is forked. Idempotent."""
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._thread = None

    def write_when_asked(self) -> None:
        """Serve until `stop`. On the thread that `start` makes; the trainer leaves it out of stacks, by this name."""
        poll = select.poll()  # select(2) can't wait for descriptors above 1,023
        for descriptor in (self._asked, self._stop):
            poll.register(descriptor, select.POLLIN)
        while True:
            readable = [descriptor for descriptor, _ in poll.poll()]
            if self._stop in readable or not os.read(self._asked, 1):
                return
            mapped = sys.modules.get("swift_loader.worker.mapped")
            if mapped is not None and (stacks := mapped.stacks_of_reads()):
                with suppress(OSError):  # the pipe is full
                    os.write(self._traces, stacks.encode())
            faulthandler.dump_traceback(file=self._traces)


_PACKAGE = str(Path(__file__).parents[1])


def stack_of(thread: int) -> str:
    """Return the Python stack of one of this process's threads, from the user's code on, or else from ours on."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way
    entries = [] if frame is None else traceback.extract_stack(frame)
    ours = list(dropwhile(lambda entry: not entry.filename.startswith(_PACKAGE), entries))
    users = list(dropwhile(lambda entry: entry.filename.startswith(_PACKAGE), ours))
    return "".join(traceback.format_list(users or ours)).rstrip("\n")


def _take_pipe(descriptor: int) -> int:
    """Return the pipe's end that lies in a socket. The socket itself, which holds less, if there is none."""
    with socket.socket(fileno=duplicate(descriptor)) as asked:
        try:  # `socket.recv_fds` ignores its flags
            flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            _, ancillary, _, _ = asked.recvmsg(1, socket.CMSG_SPACE(_FD.size), flags)
        except BlockingIOError:
            return descriptor
    if not ancillary:  # no descriptor was left for it
        return descriptor
    return avoid_std_streams(*_FD.unpack(ancillary[0][2][: _FD.size]))
