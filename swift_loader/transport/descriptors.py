"""Creates file descriptors: never 0, 1 or 2, and with a clear error if there are none left.

Some processes, such as daemons, run with their standard streams closed. Then the kernel gives 0, 1 and 2 to the next
files that are opened, and output to stdout or stderr goes into those files. So each descriptor is moved to 3 or higher
as soon as it is created. Other programs don't inherit it, unless it is passed on explicitly.

Only the imports in functions are missing on Windows, so that modules may import this one there.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from swift_loader.errors import NoDescriptorsLeft, SwiftLoaderError

_FIRST = 3
"""The first descriptor that isn't a standard stream."""

_SUGGESTED = 1024
"""The default limit of most systems. A loader needs about 10 descriptors, and 6 more for each worker."""


def out_of_descriptors_error(code: int = errno.EMFILE) -> NoDescriptorsLeft:
    """Return the error for a descriptor that can't be opened, with the limit and how to raise it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if code == errno.ENFILE:
        return NoDescriptorsLeft(code, "the system has run out of file descriptors: see /proc/sys/fs/file-max")
    wanted = max(_SUGGESTED, 2 * soft)
    may = "" if hard == resource.RLIM_INFINITY or hard >= wanted else f"; raise the hard limit of {hard} first"
    return NoDescriptorsLeft(
        code,
        f"this process (pid {os.getpid()}) has run out of file descriptors: it may have {soft} of them "
        f"(RLIMIT_NOFILE). A loader needs about 10, and 6 more for each worker. Raise the limit, for example to "
        f"{wanted}: `ulimit -n {wanted}` in the shell, or resource.setrlimit in Python{may}",
    )


@contextmanager
def explaining_limits() -> Iterator[None]:
    """Raise `NoDescriptorsLeft`, which names the limit, if the block fails because descriptors have run out."""
    try:
        yield
    except OSError as error:
        is_explained = isinstance(error, SwiftLoaderError) or error.__cause__ is not None  # with a cause: a worker's
        if error.errno in (errno.EMFILE, errno.ENFILE) and not is_explained and sys.platform != "win32":
            raise out_of_descriptors_error(error.errno) from error
        raise


def avoid_std_streams(descriptor: int) -> int:
    """Return the descriptor itself if it is 3 or higher, else a duplicate that is. Takes ownership of `descriptor`.

    Raises `NoDescriptorsLeft` if no duplicate could be made; `descriptor` is closed then.
    """
    if descriptor >= _FIRST:
        return descriptor
    import fcntl

    try:
        with explaining_limits():
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(descriptor)


def new_eventfd(count: int = 0) -> int:
    """Return a new eventfd. It is readable while its count isn't 0."""
    with explaining_limits():
        return avoid_std_streams(os.eventfd(count, os.EFD_CLOEXEC))


def new_memfd(name: str) -> int:
    """Return a new anonymous file that can be sealed."""
    with explaining_limits():
        return avoid_std_streams(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def new_epoll() -> select.epoll:
    """Return a new epoll object."""
    import fcntl

    with explaining_limits():
        epoll = select.epoll()
        if epoll.fileno() >= _FIRST:
            return epoll
        try:
            return select.epoll.fromfd(fcntl.fcntl(epoll.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST))
        finally:
            epoll.close()


def open_pidfd(pid: int) -> int:
    """Return a new pidfd for a process."""
    with explaining_limits():
        return avoid_std_streams(os.pidfd_open(pid))


def duplicate(descriptor: int) -> int:
    """Return a duplicate of a descriptor, which the caller owns."""
    import fcntl

    with explaining_limits():
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)


def new_pipe() -> tuple[int, int]:
    """Return the two ends of a new pipe: first the one to read from, then the one to write to."""
    with explaining_limits():
        return _both_avoid_std_streams(*os.pipe())


def new_socketpair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Return a new pair of connected Unix sockets."""
    with explaining_limits():
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        first, second = _both_avoid_std_streams(one.detach(), other.detach())
        return socket.socket(socket.AF_UNIX, kind, 0, first), socket.socket(socket.AF_UNIX, kind, 0, second)


def _both_avoid_std_streams(one: int, other: int) -> tuple[int, int]:
    try:
        one = avoid_std_streams(one)
    except BaseException:
        os.close(other)
        raise
    try:
        return one, avoid_std_streams(other)
    except BaseException:
        os.close(one)
        raise
