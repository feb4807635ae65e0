from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from swift_loader.worker.stack_dumps import DUMP_SIGNAL, StackDumper
from tests.support.forked import LIMIT_S, run_in_fork


class Ends(NamedTuple):
    """What a trainer and a process have for stacks."""

    ours: socket.socket
    theirs: socket.socket
    traces: int
    """The pipe from which the trainer reads."""

    def read_all(self) -> str:
        """Return what a process has written that has ended."""
        self.theirs.close()  # with it, the end of the pipe that lies in it
        pieces = iter(lambda: os.read(self.traces, 1 << 16), b"")
        return b"".join(pieces).decode()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    theirs.setblocking(False)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    socket.send_fds(ours, [b"\0"], [writer])
    os.close(writer)
    with ours, theirs:
        yield Ends(ours, theirs, reader)
    os.close(reader)


def test_the_stacks_of_all_threads_come_on_request(ends: Ends) -> None:
    ours, theirs, traces = ends

    def work() -> None:
        ours.close()
        stack_dumper = StackDumper(theirs.fileno())
        stack_dumper.start()
        assert len(stack_dumper.thread_ids) == 1
        assert len(stack_dumper.descriptors) == 3
        os.eventfd_read(told)
        stack_dumper.stop()
        stack_dumper.stop()
        assert stack_dumper.thread_ids == []
        assert len(stack_dumper.descriptors) == 2
        assert threading.active_count() == 1

    told = os.eventfd(0)
    found: list[str] = []

    def ask() -> None:
        ours.send(b"?")
        stacks = ""
        while "in work" not in stacks:  # they come in pieces
            stacks += os.read(traces, 1 << 16).decode()
        found.append(stacks)
        os.eventfd_write(told, 1)

    asking = threading.Thread(target=ask)
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(LIMIT_S)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    asking.start()
    asking.join(60)
    _, status = os.waitpid(pid, 0)
    os.close(told)
    assert status == 0
    assert "Current thread" in found[0]


def test_a_crash_is_shown_although_a_library_has_set_a_handler_since(ends: Ends) -> None:
    ours, theirs, _ = ends

    def work() -> None:
        ours.close()
        faulthandler.enable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        StackDumper(theirs.fileno())
        signal.raise_signal(signal.SIGSEGV)

    exit_code = run_in_fork(work)
    assert exit_code == -signal.SIGSEGV
    assert "in work" in ends.read_all()


@pytest.mark.parametrize("number", [DUMP_SIGNAL, signal.SIGSEGV])
def test_the_stacks_come_on_a_signal(number: signal.Signals, ends: Ends) -> None:
    ours, theirs, _ = ends

    def work() -> None:
        ours.close()
        StackDumper(theirs.fileno())
        signal.raise_signal(number)

    exit_code = run_in_fork(work)
    assert exit_code == (0 if number is DUMP_SIGNAL else -number)
    assert "in work" in ends.read_all()


@pytest.mark.parametrize("number", [DUMP_SIGNAL, signal.SIGSEGV])
def test_deep_stacks_come_whole_although_nobody_reads_meanwhile(number: signal.Signals, ends: Ends) -> None:
    ours, theirs, _ = ends

    def work(depth: int = 80) -> None:
        if depth:
            work(depth - 1)
            return
        ours.close()
        StackDumper(theirs.fileno())
        signal.raise_signal(number)

    run_in_fork(work)
    assert ends.read_all().count("in work\n") == 81
