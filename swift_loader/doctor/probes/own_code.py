"""Tells the user's own code from that of libraries, in this interpreter."""

from __future__ import annotations

import dataclasses
import functools
import os
import sysconfig
from pathlib import Path

import swift_loader
from swift_loader.doctor.facts import Line
from swift_loader.doctor.rules.lines import users_files

__all__ = ["as_shown", "is_users_file", "shown_file"]

_HERE = f"{os.getcwd()}{os.sep}"
"""Now, because the dataset may change it."""


@functools.cache
def is_users_file(file: str) -> bool:
    """Return whether a file is neither of the standard library, nor of an installed package, nor of this one."""
    return _is_users()(file)


def shown_file(file: str) -> str:
    """Return a path as people are shown it: from the working directory, if the file is below it."""
    return file.removeprefix(_HERE)


def as_shown(line: Line | None) -> Line | None:
    """Return a line with such a path."""
    return None if line is None else dataclasses.replace(line, file=shown_file(line.file))


@functools.cache
def _is_users() -> functools.partial[bool]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = str(Path(swift_loader.__file__).parent)
    return functools.partial(users_files([f"{folder}{os.sep}" for folder in (*folders, package)]))
