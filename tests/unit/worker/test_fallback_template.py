"""The fallback template forks the process it is used in, so each test has a process of its own."""

from __future__ import annotations

import os
import signal

import pytest

from swift_loader.worker.fallback_template import FallbackTemplate
from tests.support.forked import run_in_fork
from tests.support.helpers import is_gone, wait_until


@pytest.mark.parametrize("exit_code", [0, 5])
def test_the_fallback_template_takes_over_and_its_exit_code_is_returned(exit_code: int) -> None:
    def template() -> None:
        fallback = FallbackTemplate.fork()
        if fallback is None:
            os._exit(exit_code)
        os._exit(10 + fallback.take_over())

    assert run_in_fork(template) == 10 + exit_code


def test_a_fallback_template_that_a_signal_ends_gives_the_signal() -> None:
    def template() -> None:
        fallback = FallbackTemplate.fork()
        if fallback is None:
            os.kill(os.getpid(), signal.SIGKILL)
        assert fallback is not None
        assert fallback.take_over() == -signal.SIGKILL

    assert run_in_fork(template) == 0


def test_a_fallback_template_that_is_not_needed_leaves_neither_process_nor_descriptor() -> None:
    def template() -> None:
        before = os.listdir("/proc/self/fd")
        fallback = FallbackTemplate.fork()
        if fallback is None:
            os._exit(9)
        os.fstat(fallback.fileno())
        fallback.release()
        assert os.listdir("/proc/self/fd") == before
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, 0)

    assert run_in_fork(template) == 0


def test_a_fallback_template_ends_with_its_template() -> None:
    read, write = os.pipe()

    def template() -> None:
        if FallbackTemplate.fork() is None:
            os._exit(9)
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as children:
            os.write(write, children.read())

    assert run_in_fork(template) == 0
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    wait_until(lambda: is_gone(pid), "the fallback template has ended with its template")
