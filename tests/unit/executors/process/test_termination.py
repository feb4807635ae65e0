from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swift_loader.executors.process.termination import stop_processes

WAITS_FOR_EOF = ("cat",)
WAITS = ("sleep", "60")
IGNORES_SIGTERM = ("sh", "-c", "trap '' TERM; echo; exec sleep 60")


@contextmanager
def running(command: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a process and its pidfd."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            yield process, pidfd
        finally:
            process.kill()
            os.close(pidfd)


@pytest.mark.parametrize(
    ("command", "exit_code"), [(WAITS_FOR_EOF, 0), (WAITS, -signal.SIGTERM), (IGNORES_SIGTERM, -signal.SIGKILL)]
)
def test_a_process_gets_the_mildest_end_that_it_obeys(command: tuple[str, ...], exit_code: int) -> None:
    with running(command) as (process, pidfd):
        assert process.stdin is not None
        assert process.stdout is not None
        if command is IGNORES_SIGTERM:
            process.stdout.readline()
        process.stdin.close()
        stop_processes([pidfd])
        assert process.poll() == exit_code


def test_a_process_that_ends_by_itself_is_spared_the_signals_for_others() -> None:
    with running(WAITS_FOR_EOF) as (mild, mild_pidfd), running(WAITS) as (stubborn, stubborn_pidfd):
        assert mild.stdin is not None
        mild.stdin.close()
        stop_processes([mild_pidfd, stubborn_pidfd])
        assert (mild.poll(), stubborn.poll()) == (0, -signal.SIGTERM)


def test_a_process_that_was_reaped_before_has_ended() -> None:
    with running(WAITS_FOR_EOF) as (process, pidfd):
        process.communicate()
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        stop_processes(iter([pidfd]))
        assert process.returncode == 0
