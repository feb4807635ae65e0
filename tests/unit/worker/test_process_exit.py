from __future__ import annotations

import os
import signal
import sys

import pytest

from swift_loader.worker.process_exit import die_with_parent, end_group, end_process, flush_streams, lead_group
from tests.support.forked import run_in_fork
from tests.support.helpers import is_gone, wait_until


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_process_ends_with_its_parent_even_if_it_is_stopped(is_stopped: bool) -> None:
    read, write = os.pipe()

    def parent() -> None:
        own = os.getpid()
        pid = os.fork()
        if not pid:
            die_with_parent(own)
            os.write(write, b"%d" % os.getpid())
            if is_stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            signal.pause()
        if is_stopped:
            os.waitpid(pid, os.WUNTRACED)
        else:
            os.write(write, os.read(read, 20))

    assert run_in_fork(parent) == 0
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    wait_until(lambda: is_gone(pid), "the process has ended with its parent")


def test_a_process_whose_parent_has_ended_already_ends_at_once() -> None:
    assert run_in_fork(lambda: die_with_parent(os.getpid())) == 1


def test_the_rest_of_a_group_is_ended_with_its_leader() -> None:
    read, write = os.pipe()

    def leader() -> None:
        lead_group()
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.write(write, b"%d" % os.getpid())
            signal.pause()
        signal.pause()

    pid = os.fork()
    if not pid:
        try:
            signal.alarm(60)
            leader()
        finally:
            os._exit(1)
    other = int(os.read(read, 20))
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    end_group(pid)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    wait_until(lambda: is_gone(other), "the rest of the group has ended")
    end_group(pid)


@pytest.mark.parametrize(("exit_code", "seen"), [(0, 0), (7, 7), (-1, 255), (256 + 3, 3)])
def test_a_process_ends_with_its_exit_code_and_without_the_tear_down(exit_code: int, seen: int) -> None:
    class Loud:
        def __del__(self) -> None:
            os._exit(99)

    def work() -> None:
        kept = [Loud()]
        kept.append(kept)  # type: ignore[arg-type]
        end_process(exit_code)

    assert run_in_fork(work) == seen


def test_buffered_output_is_written_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("output") / "out"

    def work() -> None:
        with path.open("w") as file:
            sys.stdout = file
            file.write("once")
            flush_streams()
            run_in_fork(lambda: end_process(0))
            sys.stdout = None
            flush_streams()

    assert run_in_fork(work) == 0
    assert path.read_text() == "once"
