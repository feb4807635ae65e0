"""Says what goes together with the option `executor` of a DataLoader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_loader.options import WorkerType
from swift_loader.ray_executor import check_executor


def num_of_actors(executor: Any, num_workers: int, others: Mapping[str, Any], worker_type: Any) -> int:
    """Return the number of workers: that of the executor, if there is one.

    `num_workers`: 0 if it wasn't given. `others`: options that say where workers come from, by name; None: not given.
    Raises `TypeError` if it is no executor, `ValueError` if another option contradicts it.
    """
    checked = check_executor("executor", executor)
    if checked is None:
        return num_workers
    if num_workers not in (0, checked.num_workers):
        raise ValueError(
            f"num_workers={num_workers} was given with an executor of {checked.num_workers}; leave num_workers out"
        )
    given = [f"{name}=" for name, value in others.items() if value is not None]
    given += [f"worker_type={worker_type!r}"] if worker_type != WorkerType.PROCESS else []
    if given:
        raise ValueError(f"{' and '.join(given)} was given with executor=, which says where workers are; leave it out")
    return checked.num_workers
