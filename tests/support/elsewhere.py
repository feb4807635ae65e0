"""Makes the package fail where only Linux has something, as if it ran on another system.

A test puts a `sitecustomize.py` that calls `pretend` into a folder of PYTHONPATH. So the trainer and the workers are
all like that, from their start. What tests use to look at processes still works.
"""

from __future__ import annotations

import builtins
import io
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

CODE = "from tests.support.elsewhere import pretend\npretend()\n"
"""Of the `sitecustomize.py`."""

MISSING: dict[Any, list[str]] = {
    os: ["memfd_create", "pidfd_open", "eventfd", "eventfd_read", "eventfd_write", "posix_fallocate"],
    signal: ["pidfd_send_signal"],
    socket: ["send_fds", "recv_fds"],
    socket.socket: ["sendmsg", "recvmsg", "recvmsg_into"],
}
"""These fail when the package calls them."""

ABSENT: dict[Any, list[str]] = {
    os: ["fork", "forkpty", "sched_getaffinity"],
    select: ["epoll"],
}
"""These don't exist: others ask whether they do."""

ABSENT_MODULES = ["fcntl", "resource"]
"""The package can't import these."""

READERS: dict[Any, list[str]] = {
    builtins: ["open"],
    io: ["open"],
    os: ["open", "listdir", "scandir", "readlink", "stat"],
}
"""These fail for /proc."""

LOOKERS = ("psutil", "tests.", "pathlib")
"""Modules of the tests, which may look at processes."""


def pretend() -> None:
    """Make all that fail in this interpreter. It can't be undone."""
    for owner, names in MISSING.items():
        for name in names:
            setattr(owner, name, _failing(name, getattr(owner, name)))
    builtins.__import__ = _without_modules(builtins.__import__)
    for owner, names in READERS.items():
        for name in names:
            setattr(owner, name, _without_proc(getattr(owner, name)))
    for owner, names in ABSENT.items():
        for name in names:
            delattr(owner, name)


def _failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("swift_loader"):
            raise OSError(38, f"{name}: this system pretends not to be Linux")
        return real(*args, **kwargs)

    return fail


def _without_modules(import_module: Callable[..., Any]) -> Callable[..., Any]:
    def import_elsewhere(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ABSENT_MODULES and sys._getframe(1).f_globals.get("__name__", "").startswith("swift_loader"):
            raise ModuleNotFoundError(f"{name}: this system pretends not to have it")
        return import_module(name, *args, **kwargs)

    return import_elsewhere


def _without_proc(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_elsewhere(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith(LOOKERS):
                raise PermissionError(13, "this system pretends to have no /proc", path)
        return read(path, *args, **kwargs)

    return read_elsewhere
