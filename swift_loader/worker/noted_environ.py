"""Notes which of the rank's variables are read, while a dataset's modules are imported and while it is built.

A dataset that depends on the rank must not be shared by ranks. C code that calls getenv(3) isn't noticed. Nor are
installed packages while they are imported: torchmetrics, Lightning and others read the rank then, to print on rank 0
only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swift_loader.worker.rank_environment import is_of_rank

__all__ = ["noting_reads"]

_OF_ENVIRON = frozenset({__name__, "os", "collections.abc", "_collections_abc"})
"""The modules between a reader and `_NotedEnviron`."""

_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages."""

_read: dict[str, str] = {}
"""Each variable that was read in this process, and the file that read it. One for all, because `os.environ` is."""


class _NotedEnviron(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001 - its class is all that can be replaced
    """`os.environ`, which notes the reads of some variables."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and is_of_rank(key):
            _read[key] = _reader()
        return super().__getitem__(key)


def _reader() -> str:
    """Return the file that reads a variable."""
    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None and frame.f_globals.get("__name__") in _OF_ENVIRON:
        frame = frame.f_back
    return frame.f_code.co_filename


@contextmanager
def noting_reads(*, by_installed: bool) -> Iterator[set[str]]:
    """Yield a set. At the end of this context, it has the names of the rank's variables that were read in it.

    Those that aren't set count, too. `os.environ` stays the same object, because modules may have imported it.

    Args:
        by_installed: Whether what installed packages read counts.
    """
    found: set[str] = set()
    _read.clear()
    before = type(os.environ)
    os.environ.__class__ = _NotedEnviron
    try:
        yield found
    finally:
        os.environ.__class__ = before
        found.update(
            name for name, file in _read.items() if by_installed or not any(map(file.__contains__, _INSTALLED))
        )
