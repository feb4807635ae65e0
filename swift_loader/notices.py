"""Issues warnings that point at the user's line, not at this package."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from swift_loader.errors import SwiftLoaderWarning

_PACKAGE = str(Path(__file__).parent) + os.sep


def warn(text: str) -> None:
    """Issue a `SwiftLoaderWarning` at the nearest line outside this package. Call it on the loop's thread."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001 - `warnings` does the same, but can't skip files before 3.12
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SwiftLoaderWarning, stacklevel=level)
