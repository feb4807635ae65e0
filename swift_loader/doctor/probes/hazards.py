"""Descriptors and threads that make it unsafe to fork this process. Linux only; elsewhere there are none to be seen."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift_loader.worker.fork_safety import ForkHazards

__all__ = ["hazards_now", "hazards_since"]


def hazards_now() -> ForkHazards | None:
    """Return what there is now; None if it can't be seen."""
    if sys.platform != "linux":
        return None
    from swift_loader.worker.fork_safety import ForkHazards  # on Windows it can't be imported

    return ForkHazards.settled([], [])


def hazards_since(before: ForkHazards | None) -> tuple[str, tuple[str, ...]]:
    """Return what was opened and started since `before`, in words, and the names of all threads of libraries."""
    after = hazards_now()
    if before is None or after is None:
        return "", ()
    own = {str(thread.native_id) for thread in threading.enumerate()}
    text = replace(after, threads=after.threads & own).beyond(
        replace(before, threads=before.threads & own), "building it"
    )
    return text, tuple(sorted(_name_of(number) for number in after.threads - own))


def _name_of(number: str) -> str:
    try:
        return Path(f"/proc/self/task/{number}/comm").read_text(encoding="utf-8").strip()
    except OSError:  # it has ended
        return number
