"""Where a thread of this process is, as text."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

_OURS = (str(Path(__file__).parents[2]), threading.__file__)
"""The frames below the user's code are in these files."""


def stack_of(thread: threading.Thread) -> str:
    """Return the Python stack of a thread, from the user's code on; empty if the thread has ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the documented way
    if frame is None:
        return ""
    entries = traceback.extract_stack(frame)
    begin = next((number for number, entry in enumerate(entries) if not entry.filename.startswith(_OURS)), 0)
    return "".join(traceback.format_list(entries[begin:])).rstrip("\n")
