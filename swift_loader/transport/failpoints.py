"""Points in the code where a test can make a process fail, so that each fault happens at a chosen place.

They do nothing unless SWIFT_LOADER_FAILPOINTS is the path of a Python file when this module is imported. That file is
run, and its functions `visit(point)` and `identify(serial)` are the hook. The template and the workers inherit the
variable from the trainer.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "SWIFT_LOADER_FAILPOINTS"


_hook: dict[str, Any] = {}

if _path := os.environ.get(VARIABLE):
    import runpy

    _hook = runpy.run_path(_path)


def failpoint(point: str) -> None:
    """Call this where a test may make the process fail. `tests/support/faults.py` lists the points."""
    if _hook:
        _hook["visit"](point)


def identify(serial: int) -> None:
    """Call this at the start of a worker, with its serial number."""
    if _hook:
        _hook["identify"](serial)
