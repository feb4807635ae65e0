"""Says when the number of a DataLoader's workers may change.

If no batch shows which worker has built it, any worker may build it, and their number may change in an epoch.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from swift_loader.batch.tree import search
from swift_loader.dataloader.own_options import OwnOptions
from swift_loader.dataloader.randomness import rng_of
from swift_loader.dataloader.threads import needs_copies
from swift_loader.dataloader.workers import LoaderWorkers
from swift_loader.worker.seeding import Rng
from swift_loader.worker.stream_state import is_stateful


def shows_its_worker(loader: DataLoader[Any]) -> bool:
    """Return whether the batches of an epoch depend on who builds which.

    They do if they come from a worker's own shard, state or generator. Out of order, generators give other draws in
    each run anyway.
    """
    if isinstance(loader.dataset, IterableDataset) or is_stateful(loader.dataset):
        return True
    if not loader.in_order:
        return False
    if not OwnOptions.of(loader).uses_threads(loader.num_workers) and rng_of(loader) is not Rng.SAMPLE:
        return True
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    return any(True for _ in search([loader.dataset, loader.collate_fn], lambda thing: isinstance(thing, kinds)))


def refuse_resize(loader: DataLoader[Any], num_workers: int) -> None:
    """Raise `RuntimeError` if the loader's number of workers mayn't change at all. The message says what to do."""
    if not loader.num_workers:
        raise RuntimeError(
            f"resize({num_workers}) needs a loader with workers, and num_workers=0 builds batches in the calling "
            f"thread. Make the loader with num_workers=1 or more"
        )


def fitting(workers: LoaderWorkers | None, loader: DataLoader[Any]) -> LoaderWorkers | None:
    """Return workers of an earlier epoch in the number that the loader has now. None: new ones are needed."""
    if workers is None or workers.num_workers == loader.num_workers:
        return workers
    dataset, own = loader.dataset, OwnOptions.of(loader)
    if isinstance(dataset, IterableDataset) or (own.uses_threads(loader.num_workers) and needs_copies(dataset)):
        workers.close()
        return None
    workers.resize(loader.num_workers)
    return workers
