"""What each new interpreter of a loader gets from the trainer: its command line, environment and import path."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.spawn import get_command_line, get_executable
from pathlib import Path
from typing import Any

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Many workers with many threads each compete for the cores, and a process with threads can't be forked safely."""

_HASH_SEED = "24301"
"""Any fixed number. It gives sets of strings one order in all interpreters, ranks and runs, even after a resume."""


SET_BY_LIBRARIES = frozenset(
    {
        "CUDA_MODULE_LOADING",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    }
)
"""Variables that torch and its libraries set, and pytest anew for each test. No dataset depends on them."""


def _without_isolation(flags: Sequence[str]) -> list[str]:
    """Return the flags without those that would make the interpreter ignore the hash seed."""
    kept = [flag for flag in flags if flag not in ("-E", "-I")]
    return [*kept, "-s"] if "-I" in flags else kept


def interpreter_command() -> tuple[str, ...]:
    """Return the interpreter of this process, and its flags."""
    # Private, but multiprocessing uses it for the same purpose: -W, -X, -O and the like.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    return os.fsdecode(get_executable() or sys.executable), *_without_isolation(flags)


def environ_for_workers() -> dict[str, str]:
    """Return this process's environment, with what makes workers alike."""
    environ = {**_ONE_THREAD, **os.environ}
    if sys.flags.ignore_environment:  # the trainer ignored these variables, so its processes must too
        environ = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}
    if environ.get("PYTHONHASHSEED") in (None, "", "random"):
        environ["PYTHONHASHSEED"] = _HASH_SEED
    return environ


def import_path() -> tuple[str, ...]:
    """Return the trainer's import path. An empty entry means the working directory, and is replaced by its path."""
    here = working_directory()
    entries: list[Any] = [entry or here for entry in sys.path]
    found = [entry for entry in entries if isinstance(entry, str)]  # the import system ignores all others
    folder = str(Path(__file__).parents[2])
    return (*found, *([] if folder in found else [folder]))


def working_directory() -> str | None:
    """Return the working directory; None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


class _Program(str):
    """Text that runs when it is unpickled."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return exec, (str(self), {})


@dataclass(frozen=True, slots=True)
class Launch:
    """The environment of this process, recorded, to start interpreters in it. Subclasses start them.

    A dataset depends on more than its arguments: on the working directory, the environment, the import path and the
    hash seed. They are recorded once and given to each interpreter that builds the dataset, even to a replacement hours
    later. Changes that the trainer makes in between have no effect.
    """

    command: tuple[str, ...] = field(default_factory=interpreter_command)
    """The interpreter and its flags."""
    environ: dict[str, str] = field(default_factory=environ_for_workers)
    path: tuple[str, ...] = field(default_factory=import_path)
    """The import path."""
    has_stdout: bool = field(default_factory=lambda: sys.__stdout__ is not None)
    """False if the trainer started without a stdout. Then descriptor 1 may be something else."""

    def open(self, program: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        """Start an interpreter with this program, in the recorded environment. `options`: of `Popen`."""
        argv, stdin = ["-c", *map(str, arguments), *self.path], subprocess.DEVNULL
        command = [*self.command, "-c", program, *argv[1:]]
        if getattr(sys, "frozen", False):  # it is no interpreter: its freeze_support() reads what to do from a pipe
            command = get_command_line(pipe_handle=0)
            stdin, theirs = os.pipe()
            with open(theirs, "wb") as pipe:
                pickle.dump({"sys_path": list(self.path), "sys_argv": argv}, pipe)
                pickle.dump(_Program(program), pipe)
        try:
            return subprocess.Popen(  # noqa: S603 - our own interpreter
                command,
                stdin=stdin,
                stdout=None if self.has_stdout else subprocess.DEVNULL,
                **{"env": self.environ, **options},
            )
        finally:
            if stdin >= 0:
                os.close(stdin)

    def is_current(self) -> bool:
        """Return whether this process still has the recorded environment, apart from variables that libraries set."""
        changed = {name for name, _ in self.environ.items() ^ environ_for_workers().items()}
        return changed <= SET_BY_LIBRARIES and self.path == import_path()
