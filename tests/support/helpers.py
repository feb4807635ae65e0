"""What several test modules need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from swift_loader import SwiftLoader

ROOT = Path(__file__).parents[2]

START_METHOD = os.environ.get("SWIFT_LOADER_TESTS_START_METHOD", "template")
"""Of loaders whose test doesn't choose one. So tests of the template can run with another one."""

WORKER_TYPE = os.environ.get("SWIFT_LOADER_TESTS_WORKER_TYPE", "process")
"""Of loaders whose test doesn't choose one. So tests of processes can run with threads."""

needs_own_generators = pytest.mark.skipif(WORKER_TYPE == "thread", reason="threads share the global generators")

needs_template = pytest.mark.skipif(START_METHOD == "portable", reason="portable workers have no template")

LIKE_A_FORK: dict[str, str] = (
    {"start_method": START_METHOD} if START_METHOD == "portable" else {"multiprocessing_context": "fork"}
)
"""Options of a DataLoader whose test doesn't choose how workers start: quickly, if they may be forked."""

_Case = TypeVar("_Case")


def slow(*values: object) -> Any:
    """Return a case of a parametrised test that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values: object) -> Any:
    """Return a case of a parametrised test that only a run of all cases has."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def slow_unless(
    quick: Container[_Case], cases: Iterable[_Case], is_sampled: Callable[[_Case], bool] = lambda _: True
) -> list[Any]:
    """Return the cases of a parametrised test. Others are marked slow, or exhaustive if not sampled."""
    others = {True: slow, False: exhaustive}
    return [case if case in quick else others[is_sampled(case)](case) for case in cases]


def every(step: int, cases: Iterable[_Case]) -> list[_Case]:
    """Return one of `step` cases, in turn: a sample of them."""
    return list(cases)[::step]


def make_loader(dataset_class: Any, *, workers: int | str = 2, batch_size: int = 8, **options: Any) -> SwiftLoader:
    """Return a loader with the defaults of these tests; `kwargs` go to the dataset."""
    options.setdefault("seed", 7)
    options.setdefault("start_method", START_METHOD)
    options.setdefault("worker_type", WORKER_TYPE)
    kwargs = options.pop("kwargs", {})
    return SwiftLoader(dataset_class, kwargs, batch_size=batch_size, worker_per_consumer=workers, **options)


def worker_processes() -> list[psutil.Process]:
    """Return the workers of the only loader of this process, once they exist."""
    children: list[psutil.Process] = psutil.Process().children()
    return children if START_METHOD == "portable" else children[0].children()


def ids_of(batches: Iterable[Any]) -> list[int]:
    """Return the ids of all samples, in the order of arrival."""
    return [int(number) for batch in batches for number in batch["id"]]


STALL_S = 2.0
"""A machine that others use stops for a moment now and then, which no load average shows."""


def allowed_s(limit_s: float) -> float:
    """Return how long something may take here that may take so long on a machine with nothing else to do."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return STALL_S + limit_s * max(1.0, os.getloadavg()[0] / num_cores)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 40) -> None:
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
    """Return the processes of a session, those whose parents are gone included, zombies not."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def run_script(
    code: str,
    *arguments: str,
    via: str = "file",
    folder: Path,
    timeout_s: float = 30,
    wrapper: Sequence[str] = (),
) -> str:
    """Run Python code in a process of its own and return what it printed; its stderr must stay empty.

    `wrapper` is a command that runs the command given to it as further arguments.
    """
    code = textwrap.dedent(code)
    command, stdin = [*wrapper, sys.executable], ""
    if via == "file":
        script = folder / "script.py"
        script.write_text(code)
        command += [str(script), *arguments]
    elif via == "-c":
        command += ["-c", code, *arguments]
    else:
        command += ["-", *arguments]
        stdin = code
    finished = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return finished.stdout
