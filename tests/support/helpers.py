"""What several test modules need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from swift_loader import SwiftLoader
from swift_loader.testing import torch_workers
from tests.support.faults import environ_of

ROOT = Path(__file__).parents[2]

HANG_S = 50.0
"""What takes so long hangs. It is told before the 60 s after which the whole test is ended, with its process."""

SWITCH = "SWIFT_LOADER_ROOT"
"""The environment variable that switches roots off."""

STARTED_BY_TORCH = bool(os.environ.get("SWIFT_LOADER_TESTS_STARTED_BY_TORCH"))
"""Whether torch's DataLoader starts the workers of all loaders, as on macOS and Windows."""
if STARTED_BY_TORCH:
    _elsewhere = torch_workers()  # until this process ends
    _elsewhere.__enter__()

START_METHOD: Any = os.environ.get("SWIFT_LOADER_TESTS_START_METHOD", "template")
"""Of loaders whose test doesn't choose one. So tests of the template can run with another one."""

WORKER_TYPE: Any = os.environ.get("SWIFT_LOADER_TESTS_WORKER_TYPE", "process")
"""Of loaders whose test doesn't choose one. So tests of processes can run with threads."""

needs_own_generators = pytest.mark.skipif(WORKER_TYPE == "thread", reason="threads share the global generators")

needs_template = pytest.mark.skipif(STARTED_BY_TORCH, reason="torch's workers have no template")

LIKE_A_FORK = {"multiprocessing_context": "fork"}
"""Options of a DataLoader whose test doesn't choose how workers start: quickly, if they may be forked."""

_Case = TypeVar("_Case")


def slow(*values: object) -> Any:
    """Return a case of a parametrised test that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values: object) -> Any:
    """Return a case of a parametrised test that only a run of all cases has."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def exhaustive_unless(quick: Container[_Case], cases: Iterable[_Case]) -> list[Any]:
    """Return the cases of a parametrised test. Those that aren't quick are for a run of all cases."""
    return [case if case in quick else exhaustive(case) for case in cases]


def every(step: int, cases: Iterable[_Case]) -> list[_Case]:
    """Return one of `step` cases, in turn: a sample of them."""
    return list(cases)[::step]


def make_loader(dataset_class: Any, *, workers: Any = 2, batch_size: int = 8, **options: Any) -> SwiftLoader:
    """Return a loader with the defaults of these tests; `kwargs` go to the dataset."""
    options.setdefault("seed", 7)
    options.setdefault("start_method", START_METHOD)
    options.setdefault("worker_type", WORKER_TYPE)
    kwargs = options.pop("kwargs", {})
    return SwiftLoader(dataset_class, kwargs, batch_size=batch_size, worker_per_consumer=workers, **options)


def without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders start interpreters of their own.

    For tests that change what interpreters inherit: environment, directory, stdout. With each such change, and with
    each change back, another root would take the place of this process's.
    """
    monkeypatch.setenv(SWITCH, "0")


def set_environ(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Set an environment variable that the processes of this test's loaders get."""
    without_root(monkeypatch)
    monkeypatch.setenv(name, value)


def set_faults(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Have the processes of this test's loaders fail at failpoints; see `faults`."""
    for name, value in environ_of(text).items():
        set_environ(monkeypatch, name, value)


def once_in_a_run(factory: pytest.TempPathFactory, name: str, find: Callable[[], Any]) -> Any:
    """Return what one of the processes of a test run has found, in JSON's types. The others wait for it."""
    import fcntl  # Windows has none

    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    file = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps(find()))
        return json.loads(file.read_text())


def loader_children(trainer: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the children of this process, or another trainer. In place of its roots it returns their children.

    They are templates; workers, if the loader has no template.
    """
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for child in (trainer or psutil.Process()).children():
            found += child.children() if _is_root(child) else [child]
    return [process for process in found if not is_gone(process.pid) and not is_tracker(process)]


def template_and_workers(
    trainer: psutil.Process | None = None, num_workers: int = 1
) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the template and the workers of the only loader of this process, or of another trainer.

    It waits until there are so many workers. In place of a template that there isn't, it returns this process.
    """
    if STARTED_BY_TORCH:
        wait_until(lambda: len(loader_children()) >= num_workers, f"{num_workers} workers")
        return psutil.Process(), loader_children()
    found: list[tuple[psutil.Process, list[psutil.Process]]] = []

    def has_workers() -> bool:
        for template in loader_children(trainer):  # a fork of the root that no loader needs exits soon
            with suppress(psutil.NoSuchProcess):
                workers = [worker for worker in template.children() if not is_gone(worker.pid)]
                if len(workers) >= num_workers:
                    found.append((template, workers))
        return bool(found)

    wait_until(has_workers, f"a template with {num_workers} workers")
    assert len(found) == 1, found
    return found[0]


def worker_processes() -> list[psutil.Process]:
    """Return the workers of the only loader of this process. Waits until there are any."""
    return template_and_workers()[1]


def loader_processes(trainer: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the templates and workers of all loaders of this process, or of another trainer, without roots."""
    found = []
    for child in loader_children(trainer):
        with suppress(psutil.NoSuchProcess):
            found += [child, *(one for one in child.children(recursive=True) if not is_gone(one.pid))]
    return found


def is_tracker(process: psutil.Process) -> bool:
    """Return whether it is multiprocessing's resource tracker, which stays until the program ends."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _is_root(process: psutil.Process) -> bool:
    """Return whether a child of the trainer is a root. Its forks, which have the same command, are no such children."""
    try:
        return "from swift_loader.worker.root import main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def ids_of(batches: Iterable[Any]) -> list[int]:
    """Return the ids of all samples, in the order of arrival."""
    return [int(number) for batch in batches for number in batch["id"]]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = HANG_S) -> None:
    """Return once a condition holds that another process brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


@contextmanager
def going_on_when_told(pattern: str, go_on: Callable[[], None]) -> Iterator[list[str]]:
    """Record warnings, and call `go_on` once one of them matches. Yields the texts that match, known at the end."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        def matching() -> list[str]:
            return [text for text in [str(one.message) for one in list(told)] if re.search(pattern, text)]

        def wait() -> None:
            try:
                wait_until(lambda: bool(matching()), f"the warning {pattern!r}")
            finally:
                go_on()

        waiter = threading.Thread(target=wait)
        waiter.start()
        try:
            yield texts
        finally:
            waiter.join()
        texts += matching()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended. Whoever adopts it may reap it late."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def session_of(leader: int) -> list[psutil.Process]:
    """Return the processes of a session, those whose parents are gone included; no zombies, and no resource tracker."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found += [] if is_tracker(process) else [process]
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def program_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a program that trains in a process of its own. What it keeps goes to the folder."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # torch makes its compiler's cache folder when an optimiser is made, and never removes it.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def run_script(
    code: str,
    *arguments: str,
    via: str = "file",
    folder: Path,
    timeout_s: float = HANG_S,
    wrapper: Sequence[str] = (),
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run Python code in a process of its own and return what it printed; its stderr must stay empty.

    `wrapper` is a command that runs the command given to it as further arguments; `options` are Python's. The
    environment has these variables besides.
    """
    code = textwrap.dedent(code)
    command, stdin = [*wrapper, sys.executable, "-X", "faulthandler", *options], ""
    if via == "file":
        script = folder / "script.py"
        script.write_text(code)
        command += [str(script), *arguments]
    elif via == "-c":
        command += ["-c", code, *arguments]
    else:
        command += ["-", *arguments]
        stdin = code
    environment = {**os.environ, **(environment or {})}
    finished = subprocess.run(
        command, input=stdin, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False
    )
    assert finished.returncode == 0, f"exit code {finished.returncode}: {finished.stderr}"
    assert finished.stderr == ""
    return finished.stdout


def is_true_in_a_fork(check: Callable[[], bool]) -> bool:
    """Return whether the check is true in a fork of this process."""
    child = os.fork()
    if not child:
        is_true = False
        try:
            is_true = check()
        finally:
            os._exit(0 if is_true else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def fork_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process with threads forks
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
