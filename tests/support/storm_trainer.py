"""The trainer of a case: its directory, environment and descriptors, its processes, and those of the loader."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import IO

import numpy as np
import psutil

from tests.support.helpers import loader_children, loader_processes
from tests.support.storm_case import Case
from tests.support.storm_datasets import CONTENT, FOLDER_OF_NAMES, RECORD_NBYTES, SALT

_SETTLE_S = 30.0

_NUM_MORE_NAMES = 7


class Surroundings:
    """What datasets depend on: files, the working directory, the environment. Each can be changed, and put back."""

    def __init__(self, case: Case, root: Path) -> None:
        self._num_samples = case.num_samples
        self._here, self._there = root / "here", root / "there"
        self._old_folder, self._old_salt = Path.cwd(), os.environ.get(SALT)
        for number, folder in enumerate((self._here, self._here / "inner", self._there, self._there / "inner")):
            folder.mkdir(parents=True)
            self._write(folder, number)
        self._names.mkdir()

    @property
    def folder(self) -> str:
        """Where the dataset's files are."""
        return str(self._here)

    @property
    def _names(self) -> Path:
        return self._here / FOLDER_OF_NAMES

    def put_back(self) -> None:
        """Make all as it is when a loader is made."""
        os.chdir(self._here)
        os.environ[SALT] = "as it was"
        self._write(self._here, 0)
        shutil.rmtree(self._names)
        self._names.mkdir()
        for number in range(self._num_samples):
            (self._names / str(number)).touch()

    def change_directory(self) -> None:
        """Go where there are other files of the same names."""
        os.chdir(self._there)

    def change_environment(self) -> None:
        """Set the variable that a dataset reads."""
        os.environ[SALT] = "another"

    def grow(self) -> None:
        """Make a folder of data larger."""
        for number in range(_NUM_MORE_NAMES):
            (self._names / f"new {number}").touch()

    def replace(self) -> None:
        """Put another file in the place of the data; who has the old one open keeps it."""
        self._write(self._here, 4)

    def leave(self) -> None:
        """Make all as it was before the case."""
        os.chdir(self._old_folder)
        os.environ.pop(SALT, None)
        if self._old_salt is not None:
            os.environ[SALT] = self._old_salt

    def _write(self, folder: Path, number: int) -> None:
        new = folder / "new.bin"
        new.write_bytes(np.random.default_rng(number).bytes((self._num_samples + _NUM_MORE_NAMES) * RECORD_NBYTES))
        new.rename(folder / CONTENT)


@contextlib.contextmanager
def trainer_of(case: Case) -> Iterator[Surroundings]:
    """Be the trainer of a case for a while; what it changes in this process is put back."""
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-"))
        surroundings = Surroundings(case, Path(root))
        stack.callback(surroundings.leave)
        surroundings.put_back()
        if case.ignores_sigchld:
            old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            stack.callback(signal.signal, signal.SIGCHLD, old)
        for _ in range(case.num_descriptors):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        if case.closes_standard:
            stack.enter_context(_closed_standard())
        yield surroundings


@contextlib.contextmanager
def captured_stderr() -> Iterator[IO[str]]:
    """Have all that this process and its children write to stderr go to a file, which is yielded."""
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+") as file:
        copy = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stderr(file):
                yield file
        finally:
            os.dup2(copy, 2)
            os.close(copy)


@contextlib.contextmanager
def _closed_standard() -> Iterator[None]:
    """Close descriptors 0, 1 and 2, and put them back in the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [os.dup(number) for number in range(3)]
    for number in range(3):
        os.close(number)
    try:
        yield
    finally:
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
            os.close(copy)


class Holdings:
    """What a process has: its children, threads and descriptors."""

    def __init__(self) -> None:
        gc.collect()
        self._children = _identities(loader_processes())
        self._threads = {thread.native_id for thread in threading.enumerate()}  # a library's own come when they like
        self._descriptors = _descriptors()

    def beyond(self, before: Holdings) -> str:
        """Return in words what is more than there was before; empty if nothing is."""
        children = sorted(self._children - before._children)
        threads = self._threads - before._threads
        names = sorted(thread.name for thread in threading.enumerate() if thread.native_id in threads)
        opened = sorted(set(self._descriptors.items()) - set(before._descriptors.items()))
        parts = [f"children {children}"] if children else []
        parts += [f"{len(threads)} threads, {names}"] if threads else []
        parts += [f"descriptors {opened}"] if opened else []
        return "; ".join(parts)

    def left_behind(self) -> str:
        """Return what there is now beyond this, once that is nothing, or after a while."""
        deadline_s = time.monotonic() + _SETTLE_S
        while (left := Holdings().beyond(self)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return left

    def kill_new_children(self) -> None:
        """Have nothing of a case that failed disturb the next one."""
        for child in loader_processes():
            if not _identities([child]) <= self._children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def _identities(processes: list[psutil.Process]) -> set[tuple[int, float]]:
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add((process.pid, process.create_time()))
    return found


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
    return {number: target for number, target in found.items() if not target.endswith("/fd")}


# Processes of the loader ----------------------------------------------------------------------------------------------


def processes(rng: Random, *, templates: bool, except_for: set[int]) -> list[int]:
    """Return the loader's templates, or its workers, in random order; without templates, all are workers."""
    found: list[int] = []
    for child in loader_children():
        if child.pid in except_for:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = [worker.pid for worker in child.children()]
            found += [child.pid] if templates or not workers else workers
    rng.shuffle(found)
    return found


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def pause_self(seconds: float) -> subprocess.Popen[bytes] | None:
    """Stop this process, as Ctrl-Z or a laptop's lid does, and have it go on after a while; returns who does that."""
    if sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty():
        return None  # the shell would take it for a Ctrl-Z
    command = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
    return subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
