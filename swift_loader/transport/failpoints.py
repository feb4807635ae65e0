"""Points in the code where a test can make a process fail, so that each fault happens at a chosen place.

They do nothing unless SWIFT_LOADER_FAILPOINTS is the path of a Python file when this module is imported. That file is
run, and its function `visit(point, serial)` is the hook. The template and the workers inherit the variable from the
trainer.
"""

from __future__ import annotations

import os
from collections.abc import Callable

VARIABLE = "SWIFT_LOADER_FAILPOINTS"

_visit: Callable[[str, int | None], None] | None = None

if _path := os.environ.get(VARIABLE):
    import runpy

    _visit = runpy.run_path(_path)["visit"]


def failpoint(point: str, serial: int | None = None) -> None:
    """Call this where a test may make the process fail. `tests/support/faults.py` lists the points.

    `serial`: from now on, this process is the worker with this number.
    """
    if _visit is not None:
        _visit(point, serial)
