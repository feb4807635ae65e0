"""Starts the interpreters of a loader in the same environment, recorded when the loader starts.

As `executors.process.launch`, which says why, without what only Linux has: the working directory is a path here.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swift_loader.executors.environment import (
    environ_for_workers,
    import_path,
    interpreter_command,
    is_same_environ,
    working_directory,
)
from swift_loader.executors.process.forks import FORKS
from swift_loader.interrupts import blocked
from swift_loader.transport.portable import AnyConnection, inheriting

_PROGRAM = "import sys; sys.path[:] = sys.argv[5:]; from swift_loader.worker.portable import main; main()"
"""Run with `-c`, so that no script is imported again. Sets the import path first, as the trainer has it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The recorded environment, with which it starts interpreters."""

    command: tuple[str, ...]
    """The interpreter and its flags."""
    environ: dict[str, str]
    path: tuple[str, ...]
    """The import path."""
    directory: str | None
    """The working directory. None: it was deleted."""
    has_stdout: bool
    """False if the trainer started without a stdout."""

    @classmethod
    def of_this_process(cls) -> Launch:
        """Record the environment of this process."""
        return cls(
            command=interpreter_command(),
            environ=environ_for_workers(),
            path=import_path(),
            directory=working_directory(),
            has_stdout=sys.__stdout__ is not None,
        )

    def start(self, tasks: AnyConnection, requests: AnyConnection, names: str, serial: int) -> subprocess.Popen[bytes]:
        """Start an interpreter as a worker. It gets copies of its ends of the pipes, `tasks` and `requests`.

        `names`: what the names of its segments begin with.
        """
        arguments = [str(tasks.fileno()), str(requests.fileno()), names, str(serial), *self.path]
        with FORKS.starting, self._without_interrupts() as flags:
            return subprocess.Popen(  # noqa: S603 - our own interpreter
                [*self.command, "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=None if self.has_stdout else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=self.directory,
                **inheriting(tasks, requests),
                **{"env": self.environ, **flags},
            )

    @contextmanager
    def _without_interrupts(self) -> Iterator[dict[str, Any]]:
        """Have a process start without Ctrl-C, which would print a traceback before the process ignores it.

        Yields:
            Further arguments of `Popen`.
        """
        if sys.platform == "win32":
            # Not the launcher of a virtual environment: it would be the process that is waited for and killed.
            environ = {**self.environ, "__PYVENV_LAUNCHER__": sys.executable}
            flags = subprocess.CREATE_NEW_PROCESS_GROUP
            yield {"creationflags": flags, "executable": sys._base_executable, "env": environ}  # noqa: SLF001
            return
        with blocked({signal.SIGINT}):
            yield {}

    def is_current(self) -> bool:
        """Return whether this process still has the recorded environment, apart from variables that libraries set."""
        is_same_place = self.directory == working_directory() and self.path == import_path()
        return is_same_place and is_same_environ(self.environ)
