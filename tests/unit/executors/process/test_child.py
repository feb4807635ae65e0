"""A fork of the trainer, as a child process."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from swift_loader.executors.process.child import ForkedChild


def forked(exit_code: int | None) -> ForkedChild:
    """Return a fork that exits with this code; None: it waits for a signal."""
    pid = os.fork()
    if not pid:
        if exit_code is None:
            signal.pause()
        os._exit(exit_code or 0)
    return ForkedChild(pid)


def test_the_exit_code_is_known_after_the_wait() -> None:
    child = forked(7)
    assert child.wait(20) == 7
    assert child.wait() == 7
    assert child.returncode == 7


def test_a_wait_ends_at_its_limit_although_the_process_runs_on() -> None:
    child = forked(None)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_an_exit_code_that_somebody_else_took_is_0() -> None:
    child = forked(7)
    os.waitpid(child.pid, 0)
    assert child.wait() == 0
