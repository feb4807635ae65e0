"""Ctrl-C in a terminal goes to the trainer and all its processes at once: one traceback, and all of them gone."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.helpers import HANG_S, ROOT, exhaustive, exhaustive_unless, session_of, wait_until

CTRL_C = b"\x03"

PROGRAM = """
import fcntl, os, signal, sys, termios, time

def interrupt(number, frame):
    os.write(1, b"noticed ")
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pathlib import Path
from swift_loader import SwiftLoader
from tests.support import datasets

marker = sys.argv[1]
options = dict(batch_size=4, worker_per_consumer=2, shuffle=False, validate=False)
loader = SwiftLoader(*{source}, start_method={start!r}, **options)
{body}
"""
HANGING = "(datasets.Misbehaving, {'deed': 'hang', 'marker': marker, 'at': 0})"
COUNTING = "(datasets.Counting, {})"

STAGES = {
    "construction": ("(datasets.FailsToBuild, {'deed': 'hang', 'marker': marker})", "loader.start(0)"),
    "start": (COUNTING, "Path(marker).touch(); loader.start(0); time.sleep(30)"),
    "iteration": (HANGING, "list(loader)"),
    "idle": (COUNTING, "next(iter(loader)); Path(marker).touch(); time.sleep(30)"),
    "close": (
        HANGING.replace("'hang'", "'hold-the-interpreter'"),
        "loader.start(0); iter(loader)\nwhile not Path(marker).exists(): time.sleep(0.01)\n"
        "print('closing', flush=True); loader.close()",
    ),
}


class Terminal:
    """A program in the foreground of a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.shown = ""
        """All that was written to the terminal."""

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def read(self, until: str | None = None, timeout_s: float = HANG_S) -> None:
        """Take in what is shown until some text is there; by default until nobody has the terminal open any more."""
        deadline = time.monotonic() + timeout_s
        while until is None or until not in self.shown:
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"not within {timeout_s} s: {until or 'the end'!r}; shown:\n{self.shown}"
            try:
                self.shown += os.read(self._master, 4096).decode()
            except OSError:  # the kernel's way to say that the other side is closed
                return


@contextmanager
def terminal(code: str, *arguments: str) -> Iterator[Terminal]:
    """Run code in a session of its own whose controlling terminal is a new one, as a terminal emulator does."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHON_COLORS": "0"},  # from Python 3.13 on, tracebacks are coloured
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    ) as process:
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            for member in session_of(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            os.close(master)


def run_until(stage: str, start_method: str, folder: Path) -> contextlib.AbstractContextManager[Terminal]:
    source, body = STAGES[stage]
    return terminal(PROGRAM.format(source=source, body=body, start=start_method), str(folder / "marker"))


def wait_for_stage(stage: str, shell: Terminal, marker: Path) -> None:
    if stage == "close":
        shell.read("closing")
    wait_until(marker.exists, "the program's marker")
    if stage == "start":  # no moment in particular: some process of the loader exists
        wait_until(lambda: len(session_of(shell.process.pid)) > 1, "a process of the loader")


def wait_for_the_end(shell: Terminal) -> None:
    """Return once the program, and all that belongs to it, is gone."""
    shell.read()
    shell.process.wait(HANG_S)
    wait_until(lambda: not session_of(shell.process.pid), "the end of all processes")


@pytest.mark.parametrize("start_method", ["template", exhaustive("spawn")])
@pytest.mark.parametrize("stage", exhaustive_unless({"start", "iteration", "close"}, STAGES))
def test_ctrl_c_is_one_keyboard_interrupt_and_quiet_workers(stage: str, start_method: str, tmp_path: Path) -> None:
    with run_until(stage, start_method, tmp_path) as shell:
        wait_for_stage(stage, shell, tmp_path / "marker")
        shell.press(CTRL_C)
        wait_for_the_end(shell)
        assert shell.process.returncode == -2, shell.shown
        # One exception, which may come while the import system handles one of its own.
        chained = shell.shown.count("During handling of the above exception")
        assert shell.shown.count("Traceback") - chained == 1, shell.shown
        assert shell.shown.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("stage", exhaustive_unless({"iteration", "close"}, STAGES))
def test_a_second_ctrl_c_ends_it_too(stage: str, tmp_path: Path) -> None:
    with run_until(stage, "template", tmp_path) as shell:
        wait_for_stage(stage, shell, tmp_path / "marker")
        shell.press(CTRL_C)
        shell.read("noticed")
        shell.press(CTRL_C)  # it may come while Python prints the first one's traceback, which then ends there
        wait_for_the_end(shell)
        assert shell.process.returncode != 0
        assert "swift_loader/worker/" not in shell.shown, f"workers were heard:\n{shell.shown}"
