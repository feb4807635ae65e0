"""The trainer's handles on processes that fork others on request, and on the worker processes that come of it.

`swift_loader.worker.template` and `worker.root` are the other side.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any

from swift_loader.errors import NoDescriptorsLeft, ProtocolError
from swift_loader.executors.environment import SET_BY_LIBRARIES, Launch
from swift_loader.executors.handle import COUNTERS
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.trainer_fork import Start
from swift_loader.runtime import blocked, explaining_starts, handled_signals
from swift_loader.transport.channel import (
    Channel,
    avoid_std_streams,
    duplicate,
    explaining_limits,
    new_eventfd,
    open_pidfd,
    out_of_descriptors_error,
)
from swift_loader.transport.messages import Built, Exited, Failure, Fork, Forked, unpack
from swift_loader.transport.segments import Segment, read_word
from swift_loader.worker.process import end_group

# Starts the interpreters of a loader's templates, and of roots, in one recorded environment.

_PROGRAM = (
    "import posix, sys; posix.fchdir(int(sys.argv[4])); posix.close(int(sys.argv[4])); sys.path[:] = sys.argv[6:]; "
    "from swift_loader.worker.{} import main; main()"
)
"""Sets the import path first: a new interpreter's own path begins with the working directory, the trainer's may not."""


_LIMITS = (
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_AS,
    resource.RLIMIT_DATA,
    resource.RLIMIT_STACK,
    resource.RLIMIT_CORE,
)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _umask() -> int:
    """Return the umask; -1 if /proc isn't mounted. `os.umask` would change it for a moment."""
    with suppress(FileNotFoundError), explaining_limits(), open("/proc/self/status", encoding="utf-8") as lines:
        return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), -1)
    return -1


def _open_directory() -> int:
    with explaining_limits():
        return avoid_std_streams(os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))


def _tracker() -> int:
    """Return the descriptor of the program's resource tracker. It isn't a standard stream, also if these are closed."""
    held, mask = [os.open(os.devnull, os.O_RDWR)], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        while held[-1] <= 2:  # noqa: PLR2004 - stderr
            held.append(os.open(os.devnull, os.O_RDWR))
        return resource_tracker.getfd()  # type: ignore[return-value] # typeshed: None is possible
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # when the tracker starts, this thread's SIGINT is unblocked
        for descriptor in held:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ServerLaunch(Launch):
    """Starts templates and roots. Owns a descriptor until `close`."""

    umask: int = field(default_factory=_umask)
    """-1 if it is unknown. Then the trainer's umask at that time applies."""
    directory: int = field(default_factory=_open_directory)  # last of what can fail, because it leaves it open
    """The working directory, as a descriptor because the directory may be renamed or deleted."""

    program: str = "template"
    """Or "root"."""

    def start(self, channel: int, traces: int, stderr: int) -> subprocess.Popen[bytes]:
        """Start an interpreter, which gets copies of the descriptors. A root owns nothing but channel and stderr."""
        traces = channel if self.program == "root" else traces
        tracker = _tracker()
        return self.open(
            _PROGRAM.format(self.program),
            *(channel, os.getpid(), traces, self.directory, tracker),
            stderr=stderr,
            pass_fds=[channel, traces, self.directory, tracker],
            umask=self.umask,
        )

    def conditions(self) -> tuple[object, ...]:
        """Return what an interpreter that was started now would have from then on.

        Two interpreters with equal conditions are interchangeable.
        """
        return (
            self.command,
            {name: value for name, value in self.environ.items() if name not in SET_BY_LIBRARIES},
            self.path,
            self.umask,
            _identity(self.directory),
            _identity(1) if self.has_stdout else None,
            os.sched_getaffinity(0),
            [resource.getrlimit(number) for number in _LIMITS],
        )

    def is_current(self) -> bool:
        """Return whether this process still has the recorded environment, apart from variables that libraries set."""
        try:
            is_same_directory = os.path.samestat(os.fstat(self.directory), os.stat("."))  # noqa: PTH116
        except OSError:
            return False
        return is_same_directory and Launch.is_current(self)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.directory)


# The trainer's handle on a process that serves as a worker, whichever template it comes from.


class PidfdProcess:
    """A process with a pidfd. Any thread may use it."""

    pid: int
    diagnostics: Diagnostics
    """Its stderr and stacks."""
    pidfd = -1
    """Owned by this object; -1 once closed. Readable once the process has ended."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 for those that are closed."""
        return [self.pidfd]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.pidfd < 0 or is_readable(self.pidfd)

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until the process has ended. Return False if that takes longer."""
        with suppress(ProcessLookupError):  # it has ended since
            if not self.has_ended:
                try:
                    pidfd = open_pidfd(self.pid)  # `self.pidfd` may be closed meanwhile
                except NoDescriptorsLeft:
                    return is_readable(self.pidfd, limit_s)
                try:
                    return is_readable(pidfd, limit_s)
                finally:
                    os.close(pidfd)
        return True

    def terminate(self) -> None:
        """Send SIGTERM. Does nothing if the process has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if the process has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        with suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)  # it can't hit another process with the same number

    def ask_for_stacks(self, *, by_force: bool = False) -> str:
        """Return the Python stacks of all its threads, or why there are none. See `Diagnostics.ask_for_stacks`."""
        return self.diagnostics.ask_for_stacks(self.pid, self.pidfd, by_force=by_force)

    def close_pidfd(self) -> None:
        """Close the pidfd. Idempotent."""
        if self.pidfd >= 0:
            pidfd, self.pidfd = self.pidfd, -1  # before it is closed, see `Holder`
            os.close(pidfd)


class WorkerProcess(PidfdProcess):
    """A process that serves as a worker: a fork of a template, or one that was a template itself."""

    def __init__(self, serial: int, pid: int, pidfd: int, template: TemplateProcess, diagnostics: Diagnostics) -> None:
        self.serial = serial
        self.pid = pid
        self.pidfd = pidfd
        self.template = template
        """The template that reports its exit code."""
        self.diagnostics = diagnostics
        self.exit_code: int | None = None
        """Known once the template has reported it, or the loader has ended it."""
        FORKS.holders.add(self)

    def attach(self, slot: int | None, nbytes: int, descriptors: list[int]) -> Segment:
        """Map memory that it announced: of a slot, or `COUNTERS`. The descriptors came with the message."""
        what = "a page of counters" if slot is COUNTERS else "a segment"
        return Segment.attach(_only(descriptors, what), nbytes)

    def num_fetched(self, length_address: int) -> int | None:
        """Return the number of samples fetched for its batch, from its memory; None if the kernel doesn't allow."""
        return read_word(self.pid, length_address)

    def close(self) -> None:
        """Forward the rest of its stderr, then close the descriptors. Idempotent."""
        self.diagnostics.close()
        self.close_pidfd()
        if self.exit_code is None:
            self.exit_code = 0


def is_readable(pidfd: int, limit_s: float | None = 0) -> bool:
    """Return whether a process has ended. Wait for that at most `limit_s`; None: without a limit."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else max(0.0, limit_s) * 1000))


def _only(descriptors: list[int], what: str) -> int:
    """Return the one descriptor that came with a message.

    Raises `NoDescriptorsLeft` if none came, because the kernel drops descriptors if the receiver has no room for them,
    and `ProtocolError` if more than one came.
    """
    if not descriptors:
        raise out_of_descriptors_error()
    if len(descriptors) != 1:
        raise ProtocolError(f"{what} was announced with {len(descriptors)} descriptors")
    return descriptors[0]


_EXIT_WAIT_S = 0.5
"""How much later than the end of the pipe the exit status may arrive."""


class ServerProcess(PidfdProcess):
    """A process that forks on request: a template, or a root. Only the thread that starts it uses it.

    That thread also starts it, because the kernel kills it when the thread that started it ends.
    """

    def __init__(self, start: Start) -> None:
        """Start the process."""
        self.diagnostics = Diagnostics()
        try:
            self._channel, theirs = Channel.pair()
        except BaseException:
            self.diagnostics.close()
            raise
        self.is_gone = False
        """Whether it takes no more messages, because it has ended or become a worker."""
        FORKS.holders.add(self)
        stderr, traces = self.diagnostics.their_ends
        try:
            # Until the process has its own handlers, what the program handles, as Ctrl-C, is blocked.
            with blocked({signal.SIGINT, *handled_signals()}), FORKS.starting, explaining_starts("a process"):
                self._process = start.start(theirs.fileno(), traces, stderr)
            self.pid = self._process.pid
            try:
                self.pidfd = open_pidfd(self.pid)
            except ProcessLookupError:  # it has ended and was reaped at once, because the trainer ignores SIGCHLD
                self.pidfd = new_eventfd(1)  # readable, like the pidfd of a process that has ended
                self.is_gone = True
        except BaseException:
            self._channel.close()
            self.diagnostics.close()
            raise
        finally:
            theirs.close()
            self.diagnostics.close_their_ends()

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of its diagnostics; -1 for those that are closed."""
        return [self.pidfd, self._channel.fileno()]

    def fileno(self) -> int:
        """Return the descriptor that is readable when the process has sent something."""
        return self._channel.fileno()

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send it a message, with copies of the descriptors. Does nothing if it is gone."""
        try:
            self._channel.send(message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self.is_gone = True

    def messages(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield all messages that it has sent, with their descriptors, and note if it is gone. Doesn't block.

        Raises `ProtocolError` if one is invalid.
        """
        try:
            while (received := self._channel.receive(wait=False)) is not None:
                yield unpack(received.data), received.descriptors
        except BlockingIOError:
            if not self.has_ended:
                return
        self.is_gone = True

    def wait_exit_code(self) -> int | None:
        """Return its exit code; None if it isn't known in time, or because the trainer ignores SIGCHLD.

        Also ends the processes that were started in it.
        """
        if not self.wait_end(_EXIT_WAIT_S):
            return None
        if self._process.returncode is None:
            end_group(self.pid)
        try:
            exit_code = self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            return None
        return None if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN else exit_code

    def end_requests(self) -> None:
        """Have it exit once it has answered all requests, and its children have ended."""
        self._channel.shutdown(receives=True)

    def request_exit(self) -> None:
        """Tell it to exit once its children have. Idempotent and thread-safe."""
        self._channel.shutdown()

    def close(self) -> None:
        """Close everything. The process must have ended. Idempotent."""
        self._channel.close()
        self.wait_exit_code()
        self.diagnostics.close()
        self.close_pidfd()


class TemplateProcess(ServerProcess):
    """A process that holds the dataset: a fresh interpreter, or a fork of the root or the trainer."""

    def __init__(self, start: Start) -> None:
        """Start the process."""
        self.answer: Built | Failure | None = None
        """Its report on the dataset, or why it couldn't build it."""
        self.reason = ""
        """Why we killed it, for the error that reports its death; empty if we didn't."""
        self.is_worker = False
        """Whether it was turned into a worker."""
        self._workers: dict[int, WorkerProcess] = {}
        """Its workers that were claimed, by serial number."""
        self._unclaimed: dict[int, WorkerProcess] = {}
        self._requested: dict[int, Diagnostics] = {}
        super().__init__(start)

    def request_fork(self, serial: int, theirs: Channel, diagnostics: Diagnostics) -> None:
        """Ask it to fork a worker that serves this end of a channel. `claim` returns the worker once it exists."""
        self._requested[serial] = diagnostics
        self.send(Fork(serial, in_place=False).pack(), theirs.fileno(), *diagnostics.their_ends)

    def become_worker(self, serial: int, theirs: Channel) -> WorkerProcess:
        """Turn the template itself into a worker, and return the worker."""
        self.is_worker = True
        self.send(Fork(serial, in_place=True).pack(), theirs.fileno())
        process = WorkerProcess(serial, self.pid, duplicate(self.pidfd), self, self.diagnostics)
        self._workers[serial] = process
        return process

    def has_forked(self, serial: int) -> bool:
        """Return whether a requested worker exists and wasn't claimed yet."""
        return serial in self._unclaimed

    def claim(self, serial: int) -> WorkerProcess | None:
        """Return a requested worker, which the caller then owns. Return None if it doesn't exist."""
        process = self._unclaimed.pop(serial, None)
        if process is not None:
            self._workers[serial] = process
        return process

    def forget(self, serial: int) -> None:
        """Remove a worker that is gone."""
        self._workers.pop(serial, None)

    def close(self) -> None:
        """Close everything except claimed workers, which their owner closes. The process must have ended."""
        super().close()
        for process in self._unclaimed.values():
            process.close()

    def note(self, message: Any, descriptors: list[int]) -> None:
        """Take in one of its messages."""
        if isinstance(message, Forked) and len(descriptors) == 1:
            serial, diagnostics = message.worker, self._requested.pop(message.worker)
            self._unclaimed[serial] = WorkerProcess(serial, message.pid, descriptors[0], self, diagnostics)
        elif isinstance(message, Exited):
            process = self._workers.get(message.worker) or self._unclaimed.get(message.worker)
            if process is not None:  # else it was replaced before this message came
                process.exit_code = message.exit_code
        elif isinstance(message, (Built, Failure)):
            self.answer = message
        else:
            raise ProtocolError(
                f"a template sent an unexpected message: {type(message).__name__} with {len(descriptors)} descriptors"
            )
