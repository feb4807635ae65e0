from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.errors import NoDescriptorsLeft
from swift_loader.transport.descriptors import (
    duplicate,
    explaining_limits,
    new_epoll,
    new_eventfd,
    new_memfd,
    new_pipe,
    new_socketpair,
    open_pidfd,
    out_of_descriptors_error,
)
from tests.support.forked import run_in_fork

pytestmark = pytest.mark.processes

MAKERS: dict[str, Callable[[], Any]] = {
    "eventfd": new_eventfd,
    "memfd": lambda: new_memfd("test"),
    "epoll": new_epoll,
    "pidfd": lambda: open_pidfd(os.getpid()),
    "pipe": new_pipe,
    "socketpair": lambda: new_socketpair(socket.SOCK_SEQPACKET),
    "duplicate": lambda: duplicate(2),
}


def numbers_of(made: Any) -> list[int]:
    if isinstance(made, tuple):
        return [number for one in made for number in numbers_of(one)]
    return [made if isinstance(made, int) else made.fileno()]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_no_descriptor_becomes_a_standard_stream_or_is_inherited(make: Callable[[], Any]) -> None:
    def check() -> None:
        os.close(0)
        os.close(1)
        made = make()
        assert all(number > 2 for number in numbers_of(made))
        assert not any(os.get_inheritable(number) for number in numbers_of(made))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)

    assert run_in_fork(check) == 0


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_shortage_is_explained_and_leaves_nothing_open(make: Callable[[], Any]) -> None:
    def check() -> None:
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken = [os.dup(2) for _ in range(limit - len(os.listdir("/proc/self/fd")) + 1)]
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(2)
        with pytest.raises(NoDescriptorsLeft, match=f"it may have {limit} of them"):
            make()
        os.close(taken.pop())
        os.close(os.dup(2))

    assert run_in_fork(check) == 0


def test_a_shortage_of_the_whole_system_is_told_from_one_of_the_process() -> None:
    assert "see /proc/sys/fs/file-max" in str(out_of_descriptors_error(errno.ENFILE))
    assert "ulimit -n" in str(out_of_descriptors_error())


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "no such file"), out_of_descriptors_error(), ValueError("x")])
def test_other_errors_and_explained_ones_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explaining_limits():
        raise error
    assert caught.value is error
