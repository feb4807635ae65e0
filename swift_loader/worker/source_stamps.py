"""Tells whether the source of an imported module has changed, as in a notebook that reloads modules as they are edited.

Only modules of the user's are looked at: not those of the interpreter's own folders, which nobody edits.
"""

from __future__ import annotations

import os
import sys

_Stamp = tuple[int, int]
"""Time of the last change in ns, size in bytes."""


class SourceStamps:
    """The files of the modules that this process has imported, as they were then."""

    def __init__(self) -> None:
        self._stamps: dict[str, _Stamp | None] = {}

    def take(self) -> None:
        """Note the files of the modules that were imported since the last call."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file not in self._stamps and not file.startswith(_INSTALLED):
                self._stamps[file] = _stamp_of(file)

    def are_stale(self) -> bool:
        """Return whether one of these files isn't what it was."""
        return any(_stamp_of(file) != stamp for file, stamp in self._stamps.items())

    def __repr__(self) -> str:
        return f"<SourceStamps of {len(self._stamps)} files>"


def _stamp_of(file: str) -> _Stamp | None:
    try:
        status = os.stat(file)  # noqa: PTH116 - a Path takes longer
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


_INSTALLED = tuple({os.path.dirname(os.__file__), *(os.path.join(sys.prefix, name) for name in ("lib", "lib64"))})  # noqa: PTH118, PTH120
"""Where installed modules are."""
