"""A trainer that is killed takes all its processes with it, whatever they do, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.support.faults import environ_of
from tests.support.helpers import (
    ROOT,
    exhaustive,
    exhaustive_unless,
    is_gone,
    loader_children,
    session_of,
    template_and_workers,
    wait_until,
)

NUM_WORKERS = 2
SYSTEM_CALLS = {
    "x86_64": {"sending": {"44", "46"}, "reading": {"47"}},
    "aarch64": {"sending": {"206", "211"}, "reading": {"212"}},
}
"""The numbers of sendto, sendmsg and recvmsg."""

PROGRAM = """
import os, signal, sys, threading
from multiprocessing import resource_tracker
from pathlib import Path
from swift_loader import SwiftLoader
from tests.support import datasets

start_method, marker = sys.argv[1:]
source = {source}
options = dict(batch_size=1, worker_per_consumer=2, shuffle=False, validate=False, start_method=start_method)
loader = SwiftLoader(*source, **{{**options, **{options}}})
{body}
signal.pause()
"""
TAKE_ONE = "iterator = iter(loader); next(iterator); Path(marker).touch()"
COUNTING = "(datasets.Counting, {'num_samples': 100})"


class Program(NamedTuple):
    source: str
    """The dataset class and its arguments."""
    body: str
    options: dict[str, Any] = {}
    failpoints: str = ""


def misbehaving(deed: str) -> str:
    return f"(datasets.Misbehaving, {{'deed': {deed!r}, 'at': 0, 'marker': marker}})"


STATES = {
    "building": Program("(datasets.FailsToBuild, {'deed': 'hang', 'marker': marker})", "loader.start(0)"),
    "building without an end in C": Program(
        "(datasets.FailsToBuild, {'deed': 'hold-the-interpreter', 'marker': marker})", "loader.start(0)"
    ),
    "idle": Program(COUNTING, TAKE_ONE),
    "started by a thread that has ended": Program(
        COUNTING,
        "thread = threading.Thread(target=lambda: next(iter(loader)))\n"
        "thread.start(); thread.join(); Path(marker).touch()",
    ),
    "computing": Program(misbehaving("hang"), "list(loader)"),
    "computing without an end in C": Program(misbehaving("hold-the-interpreter"), "list(loader)"),
    "sending": Program(
        "(datasets.FillsThePipe, {'marker': marker})", f"{TAKE_ONE}; os.kill(os.getpid(), signal.SIGSTOP)"
    ),
    "stopped at start": Program(COUNTING, "loader.start(0); Path(marker).touch()", {}, "worker.boot=SIGSTOP"),
    "stopped in the midst": Program(
        COUNTING, "loader.start(0); Path(marker).touch(); list(loader)", {}, "worker.collated=SIGSTOP"
    ),
}
CASES = [(state, start_method) for start_method in ("template", "spawn", "fork") for state in STATES]
QUICK = {
    ("building", "template"),
    ("computing without an end in C", "template"),
    ("sending", "template"),
    ("started by a thread that has ended", "fork"),
}


@contextmanager
def trainer(program: Program, start_method: str, folder: Path) -> Iterator[psutil.Process]:
    """A process that runs a program, has reached its state, and has an empty folder for temporary files."""
    marker, temporary = folder / "marker", folder / "temporary"
    temporary.mkdir()
    code = PROGRAM.format(source=program.source, body=program.body, options=program.options)
    environment = {**os.environ, "TMPDIR": str(temporary), **environ_of(program.failpoints)}
    command = [sys.executable, "-c", code, start_method, str(marker)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            wait_until(marker.exists, "the program's marker")
            yield psutil.Process(process.pid)
        finally:
            for member in session_of(process.pid):
                with suppress(psutil.NoSuchProcess):
                    member.kill()


def workers_of(trainer: psutil.Process, start_method: str) -> list[psutil.Process]:
    """Return the processes that are workers once they exist; with "spawn", there is no template."""
    children = loader_children(trainer)
    return children if start_method == "spawn" else [child for parent in children for child in parent.children()]


def wait_for_state(state: str, trainer: psutil.Process, start_method: str) -> None:
    """Return once all workers are in the state; for those that say so themselves, that has been waited for."""

    def workers_are(condition: Callable[[psutil.Process], bool]) -> bool:
        workers = workers_of(trainer, start_method)
        return len(workers) == NUM_WORKERS and all(map(condition, workers))

    if state.startswith("stopped"):
        wait_until(lambda: workers_are(is_stopped), "stopped workers")
    elif state == "sending":
        wait_until(lambda: is_stopped(trainer), "a stopped trainer")
        # One of them: the other may not have been ready in time to get a task.
        blocked = is_blocked("sending")
        wait_until(lambda: any(map(blocked, workers_of(trainer, start_method))), "a worker blocked sending")
    elif state == "idle":
        wait_until(lambda: workers_are(is_blocked("reading")), "workers blocked reading")


def is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


def is_blocked(what: str) -> Callable[[psutil.Process], bool]:
    """Tell whether a process's first thread is blocked sending or reading; where that can't be seen, it is."""
    numbers = SYSTEM_CALLS.get(os.uname().machine, {}).get(what)

    def check(process: psutil.Process) -> bool:
        try:
            return numbers is None or Path(f"/proc/{process.pid}/syscall").read_text().split()[0] in numbers
        except PermissionError:
            return True

    return check


def kill_and_check(trainer: psutil.Process, folder: Path, *, also: tuple[psutil.Process, ...] = ()) -> None:
    """Kill the trainer. Return once whatever belonged to it is gone."""
    family = session_of(trainer.pid)
    assert len(family) >= 2
    names = {f"_{process.pid}_" for process in family}
    for process in (trainer, *also):
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not session_of(trainer.pid), "the end of its processes")
    assert all(not process.is_running() or is_gone(process.pid) for process in family)
    assert not list((folder / "temporary").iterdir())
    assert not [entry for entry in os.listdir("/dev/shm") if any(name in entry for name in names)]


@pytest.mark.parametrize("case", exhaustive_unless(QUICK, CASES), ids=str)
def test_when_the_trainer_is_killed_its_processes_are_gone(case: tuple[str, str], tmp_path: Path) -> None:
    state, start_method = case
    with trainer(STATES[state], start_method, tmp_path) as process:
        wait_for_state(state, process, start_method)
        kill_and_check(process, tmp_path)


@pytest.mark.parametrize("start_method", ["template", exhaustive("spawn"), exhaustive("fork")])
def test_a_resource_tracker_that_is_killed_too_changes_nothing(start_method: str, tmp_path: Path) -> None:
    program = Program(COUNTING, f"resource_tracker.ensure_running(); {TAKE_ONE}")
    with trainer(program, start_method, tmp_path) as process:
        trackers = [
            child for child in process.children() if "resource_tracker import main" in " ".join(child.cmdline())
        ]
        assert len(trackers) == 1
        kill_and_check(process, tmp_path, also=tuple(trackers))


@pytest.mark.parametrize("start_method", ["template", exhaustive("spawn")])
def test_a_fork_of_the_trainer_that_lives_on_keeps_no_worker(start_method: str, tmp_path: Path) -> None:
    """It has copies of the pipes, so the workers' ends are never closed."""
    fork = "pid = os.fork()\nif pid == 0: os.setsid(); signal.pause()\nPath(marker + '.fork').write_text(str(pid))"
    program = Program(COUNTING, f"iterator = iter(loader); next(iterator)\n{fork}\nPath(marker).touch()")
    with trainer(program, start_method, tmp_path) as process:
        fork_pid = int((tmp_path / "marker.fork").read_text())
        try:
            wait_until(lambda: os.getsid(fork_pid) == fork_pid, "a session of the fork's own")
            kill_and_check(process, tmp_path)
        finally:
            os.kill(fork_pid, signal.SIGKILL)


def test_a_stopped_template_is_gone_with_the_trainer(tmp_path: Path) -> None:
    with trainer(STATES["idle"], "template", tmp_path) as process:
        template, _ = template_and_workers(process)
        template.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(template), "a stopped template")
        kill_and_check(process, tmp_path)


def test_while_the_trainer_lives_its_processes_hold_anonymous_memory_only(tmp_path: Path) -> None:
    program = Program("(datasets.Images, {})", TAKE_ONE)
    with trainer(program, "template", tmp_path) as process:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "/memfd:swift_loader (deleted)" in maps
        assert "/dev/shm" not in maps
        kill_and_check(process, tmp_path)
