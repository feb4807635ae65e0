from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from swift_loader.worker.stack_dumps import DUMP_SIGNAL, StackDumper
from tests.support.forked import LIMIT_S, run_in_fork


@pytest.fixture(name="pair")
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def all_from(trainer: socket.socket) -> str:
    """Return what the other process has written before it ended."""
    return b"".join(iter(lambda: trainer.recv(1 << 16), b"")).decode()


def test_the_stacks_of_all_threads_come_on_request(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair

    def work() -> None:
        ours.close()
        stack_dumper = StackDumper(theirs.fileno())
        stack_dumper.start()
        assert len(stack_dumper.thread_ids) == 1
        assert len(stack_dumper.descriptors) == 2
        os.eventfd_read(told)
        stack_dumper.stop()
        stack_dumper.stop()
        assert stack_dumper.thread_ids == []
        assert stack_dumper.descriptors == [theirs.fileno()]
        assert threading.active_count() == 1

    told = os.eventfd(0)
    found: list[str] = []

    def ask() -> None:
        ours.send(b"?")
        stacks = ""
        while "in work" not in stacks:  # they come in pieces; the socket has a time limit
            stacks += ours.recv(1 << 16).decode()
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


def test_a_crash_is_shown_although_a_library_has_set_a_handler_since(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair

    def work() -> None:
        ours.close()
        faulthandler.enable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        StackDumper(theirs.fileno())
        signal.raise_signal(signal.SIGSEGV)

    exit_code = run_in_fork(work)
    theirs.close()
    assert exit_code == -signal.SIGSEGV
    assert "in work" in all_from(ours)


@pytest.mark.parametrize("number", [DUMP_SIGNAL, signal.SIGSEGV])
def test_the_stacks_come_on_a_signal(number: signal.Signals, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair

    def work() -> None:
        ours.close()
        StackDumper(theirs.fileno())
        signal.raise_signal(number)

    exit_code = run_in_fork(work)
    theirs.close()
    assert exit_code == (0 if number is DUMP_SIGNAL else -number)
    assert "in work" in all_from(ours)
