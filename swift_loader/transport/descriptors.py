"""Descriptors of ours: never one of the three that stand for the standard streams, and a clear error if there are none.

Where a process runs with its standard streams closed, as some daemons do, the kernel gives 0, 1 and 2 to whatever is
opened next, and what is written to stdout or stderr ends up in there. So each descriptor is moved up as soon as it is
made. It isn't inherited by other programs, unless it is passed on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from swift_loader.errors import NoDescriptorsLeft, SwiftLoaderError

__all__ = [
    "duplicate",
    "explained",
    "move_up",
    "new_epoll",
    "new_eventfd",
    "new_memfd",
    "new_pipe",
    "new_socketpair",
    "open_pidfd",
    "why_there_are_none",
]

_FIRST = 3
"""The first that doesn't stand for a standard stream."""

_SUGGESTED = 1024
"""What most systems allow by default. A loader with a few workers needs some 10 descriptors, and 6 for each worker."""


def why_there_are_none(code: int = errno.EMFILE) -> NoDescriptorsLeft:
    """Return the error for a descriptor that can't be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if code == errno.ENFILE:
        return NoDescriptorsLeft(code, "the system has run out of file descriptors: see /proc/sys/fs/file-max")
    wanted = max(_SUGGESTED, 2 * soft)
    may = "" if hard == resource.RLIM_INFINITY or hard >= wanted else f"; the hard limit, {hard}, is to be raised first"
    return NoDescriptorsLeft(
        code,
        f"this process (pid {os.getpid()}) has run out of file descriptors: it may have {soft} of them "
        f"(RLIMIT_NOFILE), and a loader needs some 10, and 6 for each worker. Raise the limit, to {wanted} for "
        f"instance: `ulimit -n {wanted}` in the shell, or resource.setrlimit in Python{may}",
    )


@contextmanager
def explained() -> Iterator[None]:
    """Say what the limit is, if what is done within fails because descriptors have run out."""
    try:
        yield
    except OSError as error:
        is_explained = isinstance(error, SwiftLoaderError) or error.__cause__ is not None  # else it is a worker's
        if error.errno in (errno.EMFILE, errno.ENFILE) and not is_explained:
            raise why_there_are_none(error.errno) from error
        raise


def move_up(descriptor: int) -> int:
    """Return the descriptor, or, if it stands for a standard stream, another one in its place. Owned by this call.

    Raises:
        NoDescriptorsLeft: There is no other one; this one is closed then.
    """
    if descriptor >= _FIRST:
        return descriptor
    try:
        with explained():
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(descriptor)


def new_eventfd(count: int = 0) -> int:
    """Return a new eventfd; it is readable if its count isn't 0."""
    with explained():
        return move_up(os.eventfd(count, os.EFD_CLOEXEC))


def new_memfd(name: str) -> int:
    """Return a new anonymous file, which can be sealed."""
    with explained():
        return move_up(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def new_epoll() -> select.epoll:
    """Return a new epoll object."""
    with explained():
        epoll = select.epoll()
        if epoll.fileno() >= _FIRST:
            return epoll
        try:
            return select.epoll.fromfd(fcntl.fcntl(epoll.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST))
        finally:
            epoll.close()


def open_pidfd(pid: int) -> int:
    """Return a new pidfd of a process."""
    with explained():
        return move_up(os.pidfd_open(pid))


def duplicate(descriptor: int) -> int:
    """Return a copy of a descriptor."""
    with explained():
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)


def new_pipe() -> tuple[int, int]:
    """Return the two ends of a new pipe: to read from, and to write to."""
    with explained():
        return _both_up(*os.pipe())


def new_socketpair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new pair of local sockets."""
    with explained():
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        first, second = _both_up(one.detach(), other.detach())
        return socket.socket(socket.AF_UNIX, kind, 0, first), socket.socket(socket.AF_UNIX, kind, 0, second)


def _both_up(one: int, other: int) -> tuple[int, int]:
    try:
        one = move_up(one)
    except BaseException:
        os.close(other)
        raise
    try:
        return one, move_up(other)
    except BaseException:
        os.close(one)
        raise
