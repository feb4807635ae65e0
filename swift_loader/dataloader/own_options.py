"""The options of a DataLoader that torch's doesn't have, and that say what its workers are.

They have the names, meanings and checks of SwiftLoader's.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from swift_loader.checks import check_choice, check_integer, check_seconds, checked, option
from swift_loader.dataloader.threads import check_threads
from swift_loader.options import WorkerType
from swift_loader.ray_executor import RayExecutor, check_executor
from swift_loader.worker.spec import StartMethod


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """What kind of workers a loader has, and what happens to those that die or hang."""

    worker_type: WorkerType = option("worker_type", check_choice, WorkerType)
    max_restarts: int = option("worker_restarts", check_integer, 0)
    stall_warning_s: float | None = option("stall_warning", check_seconds)
    executor: RayExecutor | None = option("executor", check_executor)

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> OwnOptions:
        """Return the options of a loader, which has them as attributes, as they are now.

        Raises `TypeError` or `ValueError` if one is wrong or contradicts another one.
        """
        own = checked(cls, vars(loader))
        if own.uses_threads(loader.num_workers):
            check_threads(loader)
        return own

    def uses_threads(self, num_workers: int) -> bool:
        """Return whether so many workers are threads. Without workers there are none."""
        return num_workers > 0 and self.worker_type is WorkerType.THREAD


def start_method_of(loader: DataLoader[Any]) -> StartMethod:
    """Return how to start worker processes: as `multiprocessing_context` says.

    None: what torch takes then, the program's default, which is a fork on Linux before Python 3.14.
    """
    context = loader.multiprocessing_context
    if context is None:  # the first of all is the system's default; asking for it would fix it
        asked = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    else:
        asked = context.get_start_method()
    if asked == "fork" and getattr(loader, "_why_no_fork", None):
        return StartMethod.TEMPLATE
    return {"fork": StartMethod.FORK, "spawn": StartMethod.SPAWN}.get(asked, StartMethod.TEMPLATE)
