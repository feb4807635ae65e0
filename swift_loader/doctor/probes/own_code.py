"""Tells the user's own code from that of libraries, in this interpreter."""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path

import swift_loader
from swift_loader.doctor.rules.lines import users_files

__all__ = ["is_users_file"]


@functools.cache
def is_users_file(file: str) -> bool:
    """Return whether a file is neither of the standard library, nor of an installed package, nor of this one."""
    return _is_users()(file)


@functools.cache
def _is_users() -> functools.partial[bool]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = str(Path(swift_loader.__file__).parent)
    return functools.partial(users_files([f"{folder}{os.sep}" for folder in (*folders, package)]))
