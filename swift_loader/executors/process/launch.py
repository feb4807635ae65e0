"""Starts interpreters in one recorded environment: templates, workers that are no forks, and roots."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker

from swift_loader.executors.environment import SET_BY_LIBRARIES, Launch
from swift_loader.transport.channel import avoid_std_streams, explaining_limits

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
    """Starts interpreters. Owns a descriptor until `close`."""

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
        """Return what a new interpreter inherits: command, environment, path, umask, directory, limits.

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
