"""Checks `num_workers="auto"`, with which a DataLoader chooses the number of its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from swift_loader.dataloader.binding import shows_its_worker
from swift_loader.options import AUTO, AutoWorkers


def first_number(num_workers: int | str) -> int:
    """Return the number of workers to begin with. Raises `TypeError` if it is no number, and not `"auto"`."""
    if not isinstance(num_workers, str):
        return num_workers
    if num_workers != AUTO:
        raise TypeError(f"num_workers={num_workers!r} is a str; give an integer, or {AUTO!r}")
    return AutoWorkers(1)


def check_auto(loader: DataLoader[Any]) -> None:
    """Check that the number of workers may change, if the loader chooses it.

    Raises `ValueError` if batches would depend on when it changes.
    """
    if not isinstance(loader.num_workers, AutoWorkers) or not shows_its_worker(loader):
        return
    reason = (
        "an IterableDataset gives other batches with another number of workers"
        if isinstance(loader.dataset, IterableDataset)
        else "its batches show which worker builds them: because of worker_init_fn, rng=None, or a state_dict or a "
        "generator of the dataset's own"
    )
    raise ValueError(f"num_workers={AUTO!r} doesn't work with this loader: {reason}. Give a number of workers")
